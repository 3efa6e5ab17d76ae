"""What frozen weights are after they were stored as codes, computed apart from the code that stores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LARGEST_CODES = {"int8": 127, "int4": 7}


def read_back(values: torch.Tensor, largest: int) -> torch.Tensor:
    """What frozen weights are after they were stored as codes of 64 elements with a bf16 scale; fp32."""
    flat = values.reshape(-1).float()
    blocks = torch.cat([flat, flat.new_zeros(-flat.numel() % 64)]).view(-1, 64)
    scales = (blocks.abs().amax(1, keepdim=True) / largest).bfloat16().float()
    codes = (blocks / scales.where(scales > 0, 1.0)).round().clamp(-largest, largest)
    return (codes * scales).view(-1)[: flat.numel()].view(values.shape)


def write_read_back(base: Path, to: Path, largest: int, ids: torch.Tensor) -> torch.Tensor:
    """Writes the base with its blocks' matrices as they are read back from codes. Returns its logits for ids [B, T]."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".layers." in name and weight.dim() == 2:
                weight.copy_(read_back(weight, largest))
        model.save_pretrained(to)
        found: torch.Tensor = model(input_ids=ids).logits
    return found
