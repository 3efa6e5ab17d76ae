"""Each operation in plain PyTorch: the specification, the fallback and the baseline of its implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Eight element-wise passes over five tensors: in pieces of this size all of them stay in a core's second-level cache
# (5 x 4 B x 16 Ki = 320 KiB). Element-wise operations have the same bits in pieces.
CHUNK_NUMEL = 16 * 1024


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of one AdamW step (arXiv 1711.05101, algorithm 2); `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: AdamW,
) -> None:
    """Update master [S] (any float dtype), exp_avg [S] and exp_avg_sq [S] (fp32) in place from grad [S] (any).

    The gradient used is `grad * grad_scale` (0-dim fp32); all arithmetic is fp32. With an fp32 master the order and
    rounding of every operation are those of `torch.optim.AdamW(foreach=False, fused=False)`: the same bits.
    """
    on_cpu = master.device.type == "cpu"
    chunk_numel = CHUNK_NUMEL if on_cpu else max(master.numel(), 1)
    for start in range(0, master.numel(), chunk_numel):
        part = slice(start, start + chunk_numel)
        _adamw_chunk(master[part], grad[part], exp_avg[part], exp_avg_sq[part], grad_scale, settings)


def _adamw_chunk(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: AdamW,
) -> None:
    grad = grad.to(torch.float32) * grad_scale
    weights = master.to(torch.float32)  # master itself where it is fp32
    weights.mul_(1 - settings.lr * settings.weight_decay)
    exp_avg.lerp_(grad, 1 - settings.beta1)
    exp_avg_sq.mul_(settings.beta2).addcmul_(grad, grad, value=1 - settings.beta2)
    step_size = settings.lr / (1 - settings.beta1**settings.step)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - settings.beta2**settings.step)).add_(settings.eps)
    weights.addcdiv_(exp_avg, denominator, value=-step_size)
    if weights is not master:
        master.copy_(weights)
