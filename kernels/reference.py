"""Each operation in plain PyTorch: the specification, the fallback and the baseline of the implementations.

[Note: updates]
An update takes master [n] (any float dtype), grad [n] (any float dtype) and its states [n] (fp32; those of AdamW,
Adam, SGD and Lion also bf16), and works in place. A bf16 state is read as fp32, the step uses its new fp32 value, and
that value is rounded once, to nearest, ties to even, when it is stored. The gradient that it uses is
`grad * grad_scale` (0-dim fp32, on the device); all arithmetic is fp32, and no value is read on the host. `numbers` are
those of the settings (see [Note: numbers] in settings.py). If `param_out` [n] (any float dtype) is given, the new
master is rounded into it. Every update is element-wise, so any split of the tensors gives the same bits.

[Note: arithmetic]
An update is a sequence of additions, subtractions, multiplications, divisions and square roots, each rounded to the
nearest fp32 number (IEEE 754), in the order in which this file calls them. No multiplication is fused with an addition,
no quotient is a product with a reciprocal, and no root is an approximation, so the bits are the same on every processor
and with every vector width. Therefore torch's compound operations are not used here: whether lerp, addcmul, addcdiv and
add(alpha=) fuse depends on the processor; torch divides a CUDA tensor by a Python number by multiplying with its
reciprocal (see `_divided`); and MKL's square root is not correctly rounded (see `root`, `root64`). The order is that of
`torch.optim(foreach=False, fused=False)`.

[Note: order of squares]
Sums of squares are fp64, in the same order for all implementations on a CPU: lane k of a group of 64 x 256 elements
adds the squares of its elements k, k + 256, ..; the 256 lanes are folded in halves, then the groups (padded with zeros
to a power of two).
A square of an fp32 number is exact in fp64 and cannot overflow, so a sum is finite if and only if all elements are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zero_runtime.kernels.block_formats import read_dynamic, write_dynamic
from zero_runtime.kernels.settings import AdamNumbers, LambNumbers, LionNumbers, MuonNumbers, SgdNumbers

# An update makes eight element-wise passes over five tensors. Small chunks stay in a core's caches (5 x 4 B x 64 Ki =
# 1.25 MiB), larger ones need fewer calls. On 14.7 M elements with one thread, chunks of 16 Ki took 39 ms, 32 Ki 30,
# 64 Ki 25, 256 Ki 65 (AMD EPYC, torch 2.13). Chunking does not change the bits of element-wise operations.
CHUNK_NUMEL = 64 * 1024
SQUARES_CHUNK_NUMEL = 1024 * 1024  # elements converted to fp64 at a time
LANES = 256
GROUP_NUMEL = 64 * LANES


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    """AdamW or Adam with the numbers of settings.AdamNumbers. See [Note: updates] and [Note: arithmetic]."""
    adam = AdamNumbers(*numbers)
    for part in _chunks(master):
        weights, scaled = master[part].to(torch.float32), grad[part].to(torch.float32) * grad_scale
        if adam.l2 != 0:
            scaled.add_(weights * adam.l2)
        else:
            weights.mul_(adam.decay)
        first, second = exp_avg[part].to(torch.float32), exp_avg_sq[part].to(torch.float32)
        _moments(scaled, first, second, adam)
        divisor = _divided(root(second), adam.correction).add_(adam.eps)
        weights.add_((first * adam.minus_step_size).div_(divisor))
        _write_back(master, weights, param_out, part)
        _keep(exp_avg, first, part)
        _keep(exp_avg_sq, second, part)


def adam_step_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    """AdamW's step of the weights from moments that stay as they are, see `adamw_`. A weight whose second moment is 0
    has had no gradient yet and stays as it is, whatever its first moment."""
    adam = AdamNumbers(*numbers)
    for part in _chunks(master):
        weights = master[part].to(torch.float32).mul_(adam.decay)
        divisor = _divided(root(exp_avg_sq[part]), adam.correction).add_(adam.eps)
        change = (exp_avg[part] * adam.minus_step_size).div_(divisor)
        weights.add_(change.masked_fill_(exp_avg_sq[part] == 0, 0.0))
        _write_back(master, weights, param_out, part)


def _lerp_(moment: torch.Tensor, grad: torch.Tensor, weight: float) -> None:
    change = grad - moment
    if weight < 0.5:
        moment.add_(change.mul_(weight))
    else:  # computed from the gradient, as torch's lerp does: with a weight of 1 the moment is exactly the gradient
        torch.sub(grad, change.mul_(1 - weight), out=moment)


def _moments(grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, adam: AdamNumbers) -> None:
    _lerp_(exp_avg, grad, adam.weight1)
    exp_avg_sq.mul_(adam.beta2).add_((grad * adam.weight2).mul_(grad))


def root(values: torch.Tensor) -> torch.Tensor:
    """The square root of fp32 values, correctly rounded with any library's fp64 square root.

    An fp64 root with an error of less than 4 units in the last place is accurate enough. Let m be the midpoint of two
    fp32 neighbours, scaled by a power of two to an odd integer from 2^24 to 2^25, and x the number, scaled by the
    square of that power: x is about 2^48 or more and has 24 significant bits, so it is a multiple of 2^25, while m^2 is
    odd. Hence |x - m^2| >= 1 and |sqrt(x) - m| = |x - m^2| / (sqrt(x) + m) > 2^-26: four fp64 units of 2^-28.
    """
    return values.to(torch.float64).sqrt_().to(torch.float32)


def root64(values: torch.Tensor) -> torch.Tensor:
    """The square root of fp64 values from 2^-300 to 2^1000 and of 0, correctly rounded unless its relative distance to
    the midpoint of two fp64 numbers is below 2^-104.

    On a CPU the root comes from a library and may be off by one unit. It is corrected by (x - s * s) / 2s, where the
    product is computed without rounding by Dekker's splitting (Numerische Mathematik 18, 1971, section 5).
    """
    found = values.sqrt()
    if values.device.type != "cpu":
        return found  # the root of CUDA is correctly rounded
    # Split the root into two halves of its bits, found = high + low, whose products are exact.
    split = found * 134217729.0  # 2^27 + 1
    high = split - (split - found)
    low = found - high
    square = found * found
    excess = ((high * high - square) + (high * low) * 2.0) + low * low
    better = found + ((values - square) - excess) / (found * 2.0)
    return torch.where((found > 0) & found.isfinite(), better, found)


def _divided(values: torch.Tensor, number: float) -> torch.Tensor:
    """values / number in place, also on devices where torch would multiply by the reciprocal of a Python number."""
    return values.div_(torch.full((), number, dtype=torch.float32, device=values.device))


def adamw8bit_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    """AdamW or Adam with 8-bit moments: codes [n] uint8, scales [blocks] fp32; see [Note: dynamic codes].

    Before the first step the scales are 0.
    """
    first = read_dynamic(exp_avg, exp_avg_scale, signed=True)
    second = read_dynamic(exp_avg_sq, exp_avg_sq_scale, signed=False)
    adamw_(master, grad, first, second, grad_scale, numbers, param_out)
    write_dynamic(first, exp_avg, exp_avg_scale, signed=True)
    write_dynamic(second, exp_avg_sq, exp_avg_sq_scale, signed=False)


def sgd_(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    nesterov: bool,
    is_first: bool,
    param_out: torch.Tensor | None = None,
) -> None:
    """SGD; `momentum_buffer` is None if momentum is 0. See [Note: updates] and [Note: arithmetic].

    If `is_first`, the buffer becomes the gradient, without dampening.
    """
    sgd = SgdNumbers(*numbers)
    for part in _chunks(master):
        weights, step = master[part].to(torch.float32), grad[part].to(torch.float32) * grad_scale
        if sgd.l2 != 0:
            step.add_(weights * sgd.l2)
        if momentum_buffer is not None:
            buffer = momentum_buffer[part].to(torch.float32)
            if is_first:
                buffer.copy_(step)
            else:
                buffer.mul_(sgd.momentum).add_(step * sgd.weight)
            _keep(momentum_buffer, buffer, part)
            step = step + buffer * sgd.momentum if nesterov else buffer
        weights.add_(step * sgd.minus_lr)
        _write_back(master, weights, param_out, part)


def lion_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    """Lion: w -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w), then m = beta2 * m + (1 - beta2) * g.

    See [Note: updates].
    """
    lion = LionNumbers(*numbers)
    for part in _chunks(master):
        weights, scaled = master[part].to(torch.float32), grad[part].to(torch.float32) * grad_scale
        moment = exp_avg[part].to(torch.float32)
        direction = (moment * lion.beta1).add_(scaled * lion.weight1).sign_()
        moment.mul_(lion.beta2).add_(scaled.mul_(lion.weight2))
        _keep(exp_avg, moment, part)
        weights.mul_(lion.decay).add_(direction.mul_(lion.minus_lr))
        _write_back(master, weights, param_out, part)


# ---- LAMB in three parts: the ranks sum the squares between the second and the third ---------------------------------


def lamb_moments_(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
) -> None:
    """Update the moments of LAMB: Adam's, with the numbers of an Adam step. See [Note: updates], [Note: arithmetic]."""
    adam = AdamNumbers(*numbers)
    for part in _chunks(grad):
        _moments(grad[part].to(torch.float32) * grad_scale, exp_avg[part], exp_avg_sq[part], adam)


def lamb_squares(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: Sequence[float]
) -> torch.Tensor:
    """[2] fp64: the sums of the squares of the weights and of the update before its trust ratio.

    See [Note: order of squares].
    """
    groups, lamb = [], LambNumbers(*numbers)
    for part in _chunks(master, SQUARES_CHUNK_NUMEL):
        weights = master[part].to(torch.float32)
        update = _lamb_update(weights, exp_avg[part], exp_avg_sq[part], lamb)
        groups.append(torch.stack([_group_sums(weights), _group_sums(update)]))
    return folded(torch.cat(groups, 1)) if groups else master.new_zeros(2, dtype=torch.float64)


def trust_ratios(squares: torch.Tensor, low: float | None = None, high: float | None = None) -> torch.Tensor:
    """[n] fp32 from [n, 2] fp64: |weights| / |update| from `low` to `high`, and 1 where either norm is 0 (as in the
    authors' code)."""
    weights, update = root64(squares).unbind(1)
    ratios = (weights / update).clamp(0.0 if low is None else low, high)
    return torch.where((weights > 0) & (update > 0), ratios, torch.ones_like(weights)).to(torch.float32)


def lamb_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ratio: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    """w -= lr * (ratio * update); `ratio` is that of the elements' parameter, 0-dim fp32. See [Note: updates]."""
    lamb = LambNumbers(*numbers)
    for part in _chunks(master):
        weights = master[part].to(torch.float32)
        update = _lamb_update(weights, exp_avg[part], exp_avg_sq[part], lamb)
        weights.add_(update.mul_(ratio).mul_(lamb.minus_lr))
        _write_back(master, weights, param_out, part)


def _lamb_update(
    weights: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, lamb: LambNumbers
) -> torch.Tensor:
    """r + weight_decay * w with r = m' / (sqrt(v') + eps) of the bias-corrected moments m' and v'."""
    first = _divided(exp_avg.clone(), lamb.correction1)
    second = _divided(exp_avg_sq.clone(), lamb.correction2)
    return first.div_(root(second).add_(lamb.eps)).add_(weights * lamb.weight_decay)


# ---- Muon: the direction of each part, the whole matrix, the update of each part -------------------------------------

# Of the Newton-Schulz iteration X' = aX + b(XX^T)X + c(XX^T)^2 X, and the least norm: Keller Jordan, Muon (2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7


def muon_direction_(
    momentum_buffer: torch.Tensor,
    grad: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    nesterov: bool,
    out: torch.Tensor,
) -> None:
    """m += (1 - momentum) * (g - m); `out` [n] (any float dtype) = m, or m - (1 - momentum) * (m - g) with nesterov.

    Numbers of settings.MuonNumbers. See [Note: updates] and [Note: arithmetic]: this is torch's lerp, and element-wise.
    """
    muon = MuonNumbers(*numbers)
    for part in _chunks(momentum_buffer):
        scaled = grad[part].to(torch.float32) * grad_scale
        moment = momentum_buffer[part]
        _lerp_(moment, scaled, muon.weight)
        if not nesterov:
            out[part].copy_(moment)
        elif muon.momentum < 0.5:
            out[part].copy_(scaled.add_((moment - scaled).mul_(muon.momentum)))
        else:
            out[part].copy_(moment - (moment - scaled).mul_(1 - muon.momentum))


def orthogonalised(matrix: torch.Tensor, squares: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearly orthogonal matrix of the same shape and dtype (float): `steps` Newton-Schulz steps, in that dtype.
    squares: `sum_of_squares` of its elements, which does not depend on the number of threads.

    The singular values of the result are between about 0.7 and 1.2. One device computes all of it; its bits depend on
    how that device orders the sums of a product of matrices.
    """
    first, second, third = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found / root64(squares).to(matrix.dtype).clamp(min=LEAST_NORM)
    for _ in range(steps):
        square = found @ found.T
        inner = torch.addmm(square, square, square, beta=second, alpha=third)
        found = torch.addmm(found, inner, found, beta=first)
    return (found.T if tall else found).contiguous()


def muon_(
    master: torch.Tensor, direction: torch.Tensor, numbers: Sequence[float], param_out: torch.Tensor | None = None
) -> None:
    """w = decay * w - lr * direction; param_out = w. `direction` [n]: of these elements, orthogonalised, any float.

    Numbers of settings.MuonNumbers. See [Note: updates].
    """
    muon = MuonNumbers(*numbers)
    for part in _chunks(master):
        weights = master[part].to(torch.float32)
        weights.mul_(muon.decay).add_(direction[part].to(torch.float32) * muon.minus_lr)
        _write_back(master, weights, param_out, part)


# ---- streams ---------------------------------------------------------------------------------------------------------


def accumulate_(target: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """target += scale * values, both [n] of any float dtype; computed in fp32 and rounded to the target's dtype."""
    for part in _chunks(target):
        target[part].copy_(target[part].to(torch.float32).add_(values[part].to(torch.float32) * scale))


def cast_copy_(target: torch.Tensor, values: torch.Tensor) -> None:
    """target = values, both [n] of any float dtype; rounded to nearest, ties to even."""
    target.copy_(values)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """0-dim fp64, finite if and only if all elements are. See [Note: order of squares]."""
    groups = [_group_sums(values[part].to(torch.float32)) for part in _chunks(values, SQUARES_CHUNK_NUMEL)]
    return folded(torch.cat(groups)) if groups else values.new_zeros((), dtype=torch.float64)


def _group_sums(values: torch.Tensor) -> torch.Tensor:
    """[groups] fp64: the sum of squares of each group. See [Note: order of squares]."""
    padded = torch.nn.functional.pad(values.to(torch.float64), (0, -values.numel() % GROUP_NUMEL))
    rows = padded.view(-(-values.numel() // GROUP_NUMEL), GROUP_NUMEL // LANES, LANES).unbind(1)
    lanes = rows[0].square()
    for row in rows[1:]:
        lanes.addcmul_(row, row)
    return folded(lanes)


def folded(sums: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension: its second half is added to its first until one element is left."""
    half = 1 << max(sums.shape[-1] - 1, 0).bit_length()
    sums = torch.nn.functional.pad(sums, (0, half - sums.shape[-1]))
    while half > 1:
        half //= 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _chunks(tensor: torch.Tensor, cpu_numel: int | None = None) -> Iterator[slice]:
    """Slices of a 1-D tensor that fit into a CPU's cache; on other devices one slice of the full tensor."""
    on_cpu = CHUNK_NUMEL if cpu_numel is None else cpu_numel
    chunk_numel = on_cpu if tensor.device.type == "cpu" else max(tensor.numel(), 1)
    for start in range(0, tensor.numel(), chunk_numel):
        yield slice(start, start + chunk_numel)


def _keep(state: torch.Tensor, values: torch.Tensor, part: slice) -> None:
    """Round the fp32 values into the state; an fp32 state is not written here: then they are its own memory."""
    if state.dtype != torch.float32:
        state[part].copy_(values)


def _write_back(master: torch.Tensor, weights: torch.Tensor, param_out: torch.Tensor | None, part: slice) -> None:
    """Round the fp32 weights into the master, and the master into param_out.

    An fp32 master is not written here: then `weights` is the master's own memory.
    """
    if master.dtype != torch.float32:
        master[part].copy_(weights)
    if param_out is not None:
        param_out[part].copy_(master[part])
