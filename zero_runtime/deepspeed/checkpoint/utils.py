"""DeepSpeed's `checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import torch

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """The same dicts, lists and tuples with copies of the tensors, in memory that has nothing else, which torch.save
    would write too. A read, so that sharded parameters raise."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(one, device) for one in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(one, device) for key, one in item.items()})
    return item
