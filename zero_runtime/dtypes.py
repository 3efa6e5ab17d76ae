"""The torch dtype of each short dtype name in `precision.py` and `optim/configs.py`, and the names of dtypes."""

from __future__ import annotations

import torch

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "uint8": torch.uint8}
_SHORT = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def short_name(dtype: torch.dtype) -> str:
    """The short name of a dtype; for one that no setting has, torch's own."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")
