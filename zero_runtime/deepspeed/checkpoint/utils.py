"""DeepSpeed's `checkpoint.utils`: copies of tensors, for torch.save."""

from __future__ import annotations

from typing import Any

import torch

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """The same lists, tuples and dicts with copies of their tensors on the device; other values as they are.

    torch.save writes the whole storage of a tensor; a copy has one of its own size.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    if isinstance(item, (list, tuple)):
        copies = [clone_tensors_for_torch_save(value, device) for value in item]
        return copies if isinstance(item, list) else tuple(copies)
    return item
