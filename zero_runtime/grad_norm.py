"""The global gradient norm and what clipping makes of it.

[Note: each element once]
A shard of the summed gradient lies on one rank (sharded) or on every rank (replicated). Of the replicas only replica 0
contributes, padding is zero, and a tied parameter lies in one unit: so one sum over all ranks counts each element once.
"""

from __future__ import annotations

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.unit import Unit

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same


def local_sum_of_squares(units: list[Unit], collectives: Collectives, device: torch.device) -> torch.Tensor:
    """0-dim fp64: this rank's part of the squared norm. See [Note: each element once]."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if collectives.replica_rank > 0:
        return total
    for unit in units:
        if unit.grad_shard is not None:
            norm = torch.linalg.vector_norm(unit.grad_shard, dtype=torch.float32)
            total += norm.to(torch.float64).square()
    return total


def clip_coefficient(norm: torch.Tensor, clip_norm: float | None) -> torch.Tensor:
    """0-dim fp32: what to multiply gradients by so that their norm is at most clip_norm; 1 without clipping."""
    if clip_norm is None:
        return torch.ones((), dtype=torch.float32, device=norm.device)
    return (clip_norm / (norm.to(torch.float32) + CLIP_EPS)).clamp(max=1.0)
