"""The global gradient norm and the clipping factor.

[Note: each element once]
Each unit's summed gradient is divided into as many equal parts as there are ranks, and rank r squares part r. This part
is a complete shard if gradients are split over all ranks, and a piece of a shard if several ranks hold the same shard.
Padding is zero and a tied parameter belongs to one unit, so one sum over the ranks counts each element once. The parts
are the same in every row of the plan's table, and so are the bits of the norm. With tensor parallelism the parts are
those of a slice, over the ranks that hold this slice; of a replicated parameter only the replica of the first rank of
each tensor-parallel group counts.
"""

from __future__ import annotations

import torch

from zero_runtime.unit import Unit

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same


def local_sum_of_squares(units: list[Unit], device: torch.device) -> torch.Tensor:
    """0-dim fp64: this rank's part of the squared norm. See [Note: each element once]."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for unit in units:
        squares = unit.gradients.squares()
        if squares is not None:
            total += squares
    return total


def clip_coefficient(norm: torch.Tensor, clip_norm: float | None) -> torch.Tensor:
    """0-dim fp32: factor that reduces the gradients' norm to at most clip_norm; 1 without clipping."""
    if clip_norm is None:
        return torch.ones((), dtype=torch.float32, device=norm.device)
    return (clip_norm / (norm.to(torch.float32) + CLIP_EPS)).clamp(max=1.0)
