"""Each operation in plain PyTorch: the specification, the fallback and the baseline of its implementations.

[Note: updates]
An update takes master [n] (any float dtype), grad [n] (any float dtype) and its states [n] (fp32), and works in
place. The gradient that it uses is `grad * grad_scale` (0-dim fp32, on the device); all arithmetic is fp32, and the
host reads nothing. Where `param_out` [n] (any float dtype) is given, the new master is rounded into it. Every update is
element-wise, so any split of the tensors gives the same bits.

[Note: order of squares]
Sums of squares are fp64, in one order for all implementations on a CPU: lane k of a group of 64 x 256 elements adds the
squares of its elements k, k + 256, ..; the 256 lanes are folded in halves, then the groups (with zeros up to a power
of two).
A square of an fp32 number is exact in fp64 and cannot overflow, so a sum is finite exactly where all elements are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.block_formats import dequantise, quantise, read_dynamic, write_dynamic
from kernels.settings import Adam, AdamW, Lamb, Lion, Sgd

__all__ = [
    "Adam",
    "AdamW",
    "Lamb",
    "Lion",
    "Sgd",
    "accumulate",
    "adamw",
    "adamw8bit",
    "cast_copy",
    "dequantise",
    "lamb",
    "lamb_moments",
    "lamb_squares",
    "lion",
    "quantise",
    "sgd",
    "sum_of_squares",
    "trust_ratios",
]

# Eight element-wise passes over five tensors: in pieces they stay in a core's caches (5 x 4 B x 64 Ki = 1.25 MiB), and
# larger pieces spread the cost of the calls. On 14.7 M elements, one thread, 16 Ki took 39 ms, 32 Ki 30, 64 Ki 25,
# 256 Ki 65 (AMD EPYC, torch 2.13). Element-wise operations have the same bits in pieces.
CHUNK_NUMEL = 64 * 1024
SQUARES_CHUNK_NUMEL = 1024 * 1024  # widened to fp64 at a time
LANES = 256
GROUP_NUMEL = 64 * LANES


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: AdamW,
    param_out: torch.Tensor | None = None,
) -> None:
    """AdamW, or Adam when `settings` are Adam's. See [Note: updates].

    With an fp32 master the order and rounding of every operation are those of
    `torch.optim.AdamW(foreach=False, fused=False)`, or of Adam: the same bits.
    """
    for part in _chunks(master):
        weights, scaled = master[part].to(torch.float32), grad[part].to(torch.float32) * grad_scale
        adam_chunk(weights, scaled, exp_avg[part], exp_avg_sq[part], settings)
        _write_back(master, weights, param_out, part)


def adam_chunk(
    weights: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: AdamW
) -> None:
    """Adam on fp32 tensors of one shape; `grad` is overwritten."""
    if settings.weight_decay != 0 and isinstance(settings, Adam):
        grad = grad.add_(weights, alpha=settings.l2)
    elif settings.weight_decay != 0:
        weights.mul_(settings.decay)
    _moments_chunk(grad, exp_avg, exp_avg_sq, settings)
    step_size = settings.lr / settings.bias_correction
    correction = settings.bias_correction_sq**0.5
    weights.addcdiv_(exp_avg, (exp_avg_sq.sqrt() / correction).add_(settings.eps), value=-step_size)


def _moments_chunk(grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: AdamW) -> None:
    exp_avg.lerp_(grad, 1 - settings.beta1)
    exp_avg_sq.mul_(settings.beta2).addcmul_(grad, grad, value=1 - settings.beta2)


def adamw8bit(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: AdamW,
    param_out: torch.Tensor | None = None,
) -> None:
    """AdamW or Adam on moments of 8 bits: codes [n] uint8, scales [blocks] fp32; see [Note: dynamic codes].

    Before the first step the scales are 0.
    """
    first = read_dynamic(exp_avg, exp_avg_scale, signed=True)
    second = read_dynamic(exp_avg_sq, exp_avg_sq_scale, signed=False)
    adamw(master, grad, first, second, grad_scale, settings, param_out)
    write_dynamic(first, exp_avg, exp_avg_scale, signed=True)
    write_dynamic(second, exp_avg_sq, exp_avg_sq_scale, signed=False)


def sgd(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad_scale: torch.Tensor,
    settings: Sgd,
    param_out: torch.Tensor | None = None,
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
        _write_back(master, weights, param_out, part)


def lion(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: Lion,
    param_out: torch.Tensor | None = None,
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
        _write_back(master, weights, param_out, part)


# ---- LAMB in three parts: between the second and the third the ranks sum the squares ---------------------------------


def lamb_moments(
    grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad_scale: torch.Tensor, settings: Lamb
) -> None:
    """The moments of LAMB, which are Adam's. See [Note: updates]."""
    for part in _chunks(grad):
        _moments_chunk(grad[part].to(torch.float32) * grad_scale, exp_avg[part], exp_avg_sq[part], settings)


def lamb_squares(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: Lamb) -> torch.Tensor:
    """[2] fp64: the sums of the squares of the weights and of the update before its trust ratio.

    See [Note: order of squares].
    """
    groups = []
    for part in _chunks(master, SQUARES_CHUNK_NUMEL):
        weights = master[part].to(torch.float32)
        update = _lamb_update(weights, exp_avg[part], exp_avg_sq[part], settings)
        groups.append(torch.stack([_group_sums(weights), _group_sums(update)]))
    return folded(torch.cat(groups, 1)) if groups else master.new_zeros(2, dtype=torch.float64)


def trust_ratios(squares: torch.Tensor) -> torch.Tensor:
    """[n] fp32 from [n, 2] fp64: |weights| / |update|, and 1 where either is 0 (as the authors' code has it)."""
    weights, update = squares.sqrt().unbind(1)
    return torch.where((weights > 0) & (update > 0), weights / update, torch.ones_like(weights)).to(torch.float32)


def lamb(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ratio: torch.Tensor,
    settings: Lamb,
    param_out: torch.Tensor | None = None,
) -> None:
    """w -= lr * ratio * update; `ratio` is one parameter's, 0-dim fp32. See [Note: updates]."""
    for part in _chunks(master):
        weights = master[part].to(torch.float32)
        update = _lamb_update(weights, exp_avg[part], exp_avg_sq[part], settings).mul_(ratio)
        weights.add_(update, alpha=-settings.lr)
        _write_back(master, weights, param_out, part)


def _lamb_update(
    weights: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: Lamb
) -> torch.Tensor:
    """r + weight_decay * w with r = m' / (sqrt(v') + eps) of the bias-corrected moments m' and v'."""
    first = exp_avg / settings.bias_correction
    second = exp_avg_sq / settings.bias_correction_sq
    return first.div_(second.sqrt_().add_(settings.eps)).add_(weights, alpha=settings.weight_decay)


# ---- streams ---------------------------------------------------------------------------------------------------------


def accumulate(target: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """target += scale * values, both [n] of any float dtype; in fp32 with one rounding into the target's dtype."""
    for part in _chunks(target):
        target[part].copy_(target[part].to(torch.float32).add_(values[part].to(torch.float32), alpha=scale))


def cast_copy(target: torch.Tensor, values: torch.Tensor) -> None:
    """target = values, both [n] of any float dtype; rounded to nearest, ties to even."""
    target.copy_(values)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """0-dim fp64, finite exactly where all elements are. See [Note: order of squares]."""
    groups = [_group_sums(values[part].to(torch.float32)) for part in _chunks(values, SQUARES_CHUNK_NUMEL)]
    return folded(torch.cat(groups)) if groups else values.new_zeros((), dtype=torch.float64)


def _group_sums(values: torch.Tensor) -> torch.Tensor:
    """[groups] fp64."""
    padded = torch.nn.functional.pad(values.to(torch.float64), (0, -values.numel() % GROUP_NUMEL))
    rows = padded.view(-(-values.numel() // GROUP_NUMEL), GROUP_NUMEL // LANES, LANES).unbind(1)
    lanes = rows[0].square()
    for row in rows[1:]:
        lanes.addcmul_(row, row)
    return folded(lanes)


def folded(sums: torch.Tensor) -> torch.Tensor:
    """The last dimension summed: its second half is added to its first, until one is left."""
    half = 1 << max(sums.shape[-1] - 1, 0).bit_length()
    sums = torch.nn.functional.pad(sums, (0, half - sums.shape[-1]))
    while half > 1:
        half //= 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _chunks(tensor: torch.Tensor, cpu_numel: int | None = None) -> Iterator[slice]:
    """Pieces that stay in the cache on a CPU; the whole on another device."""
    on_cpu = CHUNK_NUMEL if cpu_numel is None else cpu_numel
    chunk_numel = on_cpu if tensor.device.type == "cpu" else max(tensor.numel(), 1)
    for start in range(0, tensor.numel(), chunk_numel):
        yield slice(start, start + chunk_numel)


def _write_back(master: torch.Tensor, weights: torch.Tensor, param_out: torch.Tensor | None, part: slice) -> None:
    """Round the fp32 weights into the master, which they are themselves where it is fp32, and that into param_out."""
    if master.dtype != torch.float32:
        master[part].copy_(weights)
    if param_out is not None:
        param_out[part].copy_(master[part])
