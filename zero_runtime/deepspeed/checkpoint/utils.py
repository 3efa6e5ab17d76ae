"""DeepSpeed's `checkpoint.utils`: copies of tensors, for torch.save."""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.deepspeed.runtime.utils import with_tensors

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """The same lists, tuples and dicts with copies of their tensors on the device; other values as they are.

    torch.save writes the whole storage of a tensor; a copy has one of its own size.
    """
    return with_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))
