"""Which parameters of a model are stored as codes.

[Note: codes]
With `precision.weights` the frozen matrices of the repeated blocks (two dimensions or more, without those of
keep_dtype) are stored as codes, in units of their own. Embeddings, the head and norms are not: rounding them costs the
most, and their owners are few. What is trained cannot be: an update is smaller than the distance of two codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from zero_runtime.errors import PlanError


def coded_matrices(model: nn.Module, blocks: Iterable[nn.Module], keep_dtype: Sequence[str]) -> frozenset[str]:
    """The names, see [Note: codes]. PlanError if there are none."""
    inside = {id(param) for block in blocks for param in block.parameters() if param.dim() > 1}
    found = frozenset(
        name
        for name, param in model.named_parameters()
        if id(param) in inside and not param.requires_grad
        if not any(fnmatchcase(name, pattern) for pattern in keep_dtype)
    )
    if not found:
        raise PlanError(
            "precision.weights: expected frozen matrices in the model's repeated blocks, found none; freeze the model "
            "and train adapters (adapter=lora), or use precision.weights=null"
        )
    return found
