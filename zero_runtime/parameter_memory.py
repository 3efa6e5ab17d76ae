"""Refuses parameters that would be trained otherwise than in plain PyTorch: two on one memory, and sparse embeddings.

Each parameter gets memory of its own, so two on one memory would no longer be one.
"""

from __future__ import annotations

import torch
from torch import nn

from zero_runtime.deferred_values import DeferredTensor
from zero_runtime.errors import PlanError


def check_parameters(model: nn.Module) -> None:
    """Raise PlanError, which names the module or the parameters. To be called before process groups are made."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise PlanError(
                f"module {path!r}: expected an {type(module).__name__} with sparse=False, found sparse=True: gradients "
                "are dense here, and each rank updates its shard; build it without sparse, or set its `sparse` to False"
            )
    _check_memory(model)


def _check_memory(model: nn.Module) -> None:
    """Raise PlanError, which names both, if an element belongs to two parameters of the model.

    Parts of one buffer that do not overlap are allowed, and so is one Parameter under several names.
    """
    by_memory: dict[object, list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        if param.numel() and (type(param) is nn.Parameter or isinstance(param, DeferredTensor)):
            key = param.memory if isinstance(param, DeferredTensor) else param.untyped_storage()._cdata
            for other_name, other in by_memory.setdefault(key, []):
                if _overlap(param, other):
                    raise PlanError(_trouble(other_name, name, same=param.shape == other.shape))
            by_memory[key].append((name, param))


def _trouble(first: str, second: str, *, same: bool) -> str:
    module, _, own = second.rpartition(".")
    tie = f"; to tie them use one Parameter for both: `model.{module + '.' if module else ''}{own} = model.{first}`"
    return (
        f"parameters {first!r} and {second!r}: expected memory of their own, found two Parameters on the same memory, "
        f"which would be trained apart{tie if same else ''}; to have them apart, give {second!r} a copy (`.clone()`)"
    )


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors in one memory have an element in common."""
    (start, end), (other_start, other_end) = _range(first), _range(second)
    if end <= other_start or other_end <= start:
        return False
    if first.dtype != second.dtype or (first.is_contiguous() and second.is_contiguous()):
        return True
    taken = torch.zeros(max(end, other_end), dtype=torch.bool)  # parts that alternate, such as columns
    taken.as_strided(first.size(), first.stride(), first.storage_offset()).fill_(True)
    return bool(taken.as_strided(second.size(), second.stride(), second.storage_offset()).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first element in its memory, and that after the last."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum(
        (size - 1) * int(stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
