"""Modules whose parameters keep their dtype compute in it, though transformers' code does not cast between dtypes."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from orchestrator.config.state_groups import Precision
from zero_runtime.dtypes import TORCH_DTYPE


def cast_around(model: nn.Module, precision: Precision) -> None:
    """Make the modules that have a parameter of `precision.keep_dtype` take floating-point inputs in its dtype, and
    return outputs in `precision.compute`; the head returns its logits as they are, for the loss."""
    compute, head = TORCH_DTYPE[precision.compute], cast(Any, model).get_output_embeddings()
    names = {id(param): name for name, param in model.named_parameters()}  # of tied ones the first, as in the runtime
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if any(fnmatchcase(names[id(param)], pattern) for pattern in precision.keep_dtype):
                dtype = param.dtype
                module.register_forward_pre_hook(lambda _, *given, dtype=dtype: _in(dtype, given), with_kwargs=True)
                if module is not head:
                    module.register_forward_hook(lambda _, given, found: _in(compute, found))
                break


def _in(dtype: torch.dtype, values: Any) -> Any:
    return tree_map(lambda one: one.to(dtype) if torch.is_tensor(one) and one.is_floating_point() else one, values)
