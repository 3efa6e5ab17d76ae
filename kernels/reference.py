"""Each operation in plain PyTorch: the specification, the fallback and the baseline of its implementations.

[Note: updates]
An update takes master [n] (any float dtype), grad [n] (any float dtype) and its states [n] (fp32), and works in
place. The gradient that it uses is `grad * grad_scale` (0-dim fp32, on the device); all arithmetic is fp32, and the
host reads nothing. Every operation is element-wise, so any split of the tensors gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Eight element-wise passes over five tensors: in pieces they stay in a core's caches (5 x 4 B x 64 Ki = 1.25 MiB), and
# larger pieces spread the cost of the calls. On 14.7 M elements, one thread, 16 Ki took 39 ms, 32 Ki 30, 64 Ki 25,
# 256 Ki 65 (AMD EPYC, torch 2.13). Element-wise operations have the same bits in pieces.
CHUNK_NUMEL = 64 * 1024


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters of one AdamW step (arXiv 1711.05101, algorithm 2); `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class Adam(AdamW):
    """The same of Adam with L2 regularisation (arXiv 1412.6980, algorithm 1): weight_decay * weight joins the
    gradient."""


@dataclass(frozen=True)
class Sgd:
    """Hyperparameters of one SGD step as torch.optim.SGD defines it; `step` counts from 1."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    step: int


@dataclass(frozen=True)
class Lion:
    """Hyperparameters of one Lion step (arXiv 2302.06675, algorithm 2)."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


class Lamb(AdamW):
    """Hyperparameters of one LAMB step (arXiv 1904.00962, algorithm 2, with the scaling function the identity)."""


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: AdamW,
) -> None:
    """AdamW, or Adam when `settings` are Adam's. See [Note: updates].

    With an fp32 master the order and rounding of every operation are those of
    `torch.optim.AdamW(foreach=False, fused=False)`, or of Adam: the same bits.
    """
    for part in _chunks(master):
        weights, scaled = master[part].to(torch.float32), grad[part].to(torch.float32) * grad_scale
        _adam_chunk(weights, scaled, exp_avg[part], exp_avg_sq[part], settings)
        _write_back(master[part], weights)


def _adam_chunk(
    weights: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: AdamW
) -> None:
    if settings.weight_decay != 0 and isinstance(settings, Adam):
        grad = grad.add_(weights, alpha=settings.weight_decay)
    elif settings.weight_decay != 0:
        weights.mul_(1 - settings.lr * settings.weight_decay)
    _moments_chunk(grad, exp_avg, exp_avg_sq, settings)
    step_size = settings.lr / (1 - settings.beta1**settings.step)
    correction = (1 - settings.beta2**settings.step) ** 0.5
    weights.addcdiv_(exp_avg, (exp_avg_sq.sqrt() / correction).add_(settings.eps), value=-step_size)


def _moments_chunk(grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: AdamW) -> None:
    exp_avg.lerp_(grad, 1 - settings.beta1)
    exp_avg_sq.mul_(settings.beta2).addcmul_(grad, grad, value=1 - settings.beta2)


def sgd(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad_scale: torch.Tensor,
    settings: Sgd,
) -> None:
    """SGD; `momentum_buffer` is None where momentum is 0. See [Note: updates].

    With an fp32 master it has the bits of `torch.optim.SGD(foreach=False, fused=False)`: in the first step the
    buffer becomes the gradient, without dampening.
    """
    for part in _chunks(master):
        weights, step = master[part].to(torch.float32), grad[part].to(torch.float32) * grad_scale
        if settings.weight_decay != 0:
            step.add_(weights, alpha=settings.weight_decay)
        if momentum_buffer is not None:
            buffer = momentum_buffer[part]
            if settings.step == 1:
                buffer.copy_(step)
            else:
                buffer.mul_(settings.momentum).add_(step, alpha=1 - settings.dampening)
            step = step.add_(buffer, alpha=settings.momentum) if settings.nesterov else buffer
        weights.add_(step, alpha=-settings.lr)
        _write_back(master[part], weights)


def lion(
    master: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, grad_scale: torch.Tensor, settings: Lion
) -> None:
    """Lion: w -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w), then m = beta2 * m + (1 - beta2) * g.

    See [Note: updates].
    """
    for part in _chunks(master):
        weights, scaled = master[part].to(torch.float32), grad[part].to(torch.float32) * grad_scale
        direction = (exp_avg[part] * settings.beta1).add_(scaled, alpha=1 - settings.beta1).sign_()
        if settings.weight_decay != 0:
            weights.mul_(1 - settings.lr * settings.weight_decay)
        weights.add_(direction, alpha=-settings.lr)
        exp_avg[part].mul_(settings.beta2).add_(scaled, alpha=1 - settings.beta2)
        _write_back(master[part], weights)


# ---- LAMB in three parts: between the second and the third the ranks sum the squares ---------------------------------


def lamb_moments(
    grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad_scale: torch.Tensor, settings: Lamb
) -> None:
    """The moments of LAMB, which are Adam's. See [Note: updates]."""
    for part in _chunks(grad):
        _moments_chunk(grad[part].to(torch.float32) * grad_scale, exp_avg[part], exp_avg_sq[part], settings)


def lamb_squares(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: Lamb) -> torch.Tensor:
    """[2] fp64: the sums of the squares of the weights and of the update before its trust ratio."""
    total = torch.zeros(2, dtype=torch.float64, device=master.device)
    for part in _chunks(master):
        weights = master[part].to(torch.float32)
        update = _lamb_update(weights, exp_avg[part], exp_avg_sq[part], settings)
        total += torch.stack([_sum_of_squares(weights), _sum_of_squares(update)])
    return total


def trust_ratios(squares: torch.Tensor) -> torch.Tensor:
    """[n] fp32 from [n, 2] fp64: |weights| / |update|, and 1 where either is 0 (as the authors' code has it)."""
    weights, update = squares.sqrt().unbind(1)
    return torch.where((weights > 0) & (update > 0), weights / update, torch.ones_like(weights)).to(torch.float32)


def lamb(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, ratio: torch.Tensor, settings: Lamb
) -> None:
    """w -= lr * ratio * update; `ratio` is one parameter's, 0-dim fp32. Writes master alone; see [Note: updates]."""
    for part in _chunks(master):
        weights = master[part].to(torch.float32)
        update = _lamb_update(weights, exp_avg[part], exp_avg_sq[part], settings).mul_(ratio)
        weights.add_(update, alpha=-settings.lr)
        _write_back(master[part], weights)


def _lamb_update(
    weights: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: Lamb
) -> torch.Tensor:
    """r + weight_decay * w with r = m' / (sqrt(v') + eps) of the bias-corrected moments m' and v'."""
    first = exp_avg / (1 - settings.beta1**settings.step)
    second = exp_avg_sq / (1 - settings.beta2**settings.step)
    return first.div_(second.sqrt_().add_(settings.eps)).add_(weights, alpha=settings.weight_decay)


def _sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64).square_().sum()


def _chunks(tensor: torch.Tensor) -> Iterator[slice]:
    """Pieces that stay in the cache on a CPU; the whole on another device."""
    chunk_numel = CHUNK_NUMEL if tensor.device.type == "cpu" else max(tensor.numel(), 1)
    for start in range(0, tensor.numel(), chunk_numel):
        yield slice(start, start + chunk_numel)


def _write_back(master: torch.Tensor, weights: torch.Tensor) -> None:
    """Round the fp32 weights into the master, which they are themselves where it is fp32."""
    if master.dtype != torch.float32:
        master.copy_(weights)
