"""The torch dtype of each short dtype name in `precision.py` and `optim/configs.py`."""

from __future__ import annotations

import torch

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "uint8": torch.uint8}
