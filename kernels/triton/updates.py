"""Kernels for the element-wise updates, one pass over memory each. reference.py specifies what they compute.

Divisions and square roots are correctly rounded, and the order of all operations is that of the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lerp(start, end, weight, FROM_END: tl.constexpr):
    """torch's lerp, whose formula changes at a weight of one half."""
    if FROM_END:
        return end - (end - start) * (1.0 - weight)
    return start + (end - start) * weight


@triton.jit
def store_weights(weights, master, param_out, at, inside, HAS_OUT: tl.constexpr):
    """Round the weights into the master, and the rounded master into param_out."""
    rounded = weights.to(master.dtype.element_ty)
    tl.store(master + at, rounded, mask=inside)
    if HAS_OUT:
        tl.store(param_out + at, rounded.to(tl.float32).to(param_out.dtype.element_ty), mask=inside)


@triton.jit
def adamw_kernel(
    master, grad, exp_avg, exp_avg_sq, grad_scale, param_out, numel,
    decay, l2, weight1, beta2, weight2, correction, eps, minus_step_size,
    HAS_OUT: tl.constexpr, FROM_END: tl.constexpr, L2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    weights = tl.load(master + at, mask=inside, other=0.0).to(tl.float32)
    grads = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(grad_scale)
    first = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    if L2:
        grads += l2 * weights
    else:
        weights *= decay
    first = lerp(first, grads, weight1, FROM_END)
    second = second * beta2 + (grads * weight2) * grads
    weights += tl.math.div_rn(minus_step_size * first, tl.math.div_rn(tl.math.sqrt_rn(second), correction) + eps)
    tl.store(exp_avg + at, first.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, second.to(exp_avg_sq.dtype.element_ty), mask=inside)
    store_weights(weights, master, param_out, at, inside, HAS_OUT)


@triton.jit
def sgd_kernel(
    master, grad, momentum_buffer, grad_scale, param_out, numel, l2, momentum, weight, minus_lr,
    HAS_OUT: tl.constexpr, KIND: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    weights = tl.load(master + at, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(grad_scale)
    if l2 != 0:
        step += l2 * weights
    if KIND != 0:
        if KIND == 1:
            buffer = step
        else:
            buffer = tl.load(momentum_buffer + at, mask=inside, other=0.0).to(tl.float32) * momentum + weight * step
        tl.store(momentum_buffer + at, buffer.to(momentum_buffer.dtype.element_ty), mask=inside)
        if NESTEROV:
            step += momentum * buffer
        else:
            step = buffer
    store_weights(weights + minus_lr * step, master, param_out, at, inside, HAS_OUT)


@triton.jit
def lion_kernel(
    master, grad, exp_avg, grad_scale, param_out, numel, decay, beta1, weight1, beta2, weight2, minus_lr,
    HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    weights = tl.load(master + at, mask=inside, other=0.0).to(tl.float32)
    grads = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(grad_scale)
    first = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    aim = first * beta1 + weight1 * grads
    sign = (aim > 0).to(tl.float32) - (aim < 0).to(tl.float32)
    tl.store(exp_avg + at, (first * beta2 + weight2 * grads).to(exp_avg.dtype.element_ty), mask=inside)
    store_weights(weights * decay + minus_lr * sign, master, param_out, at, inside, HAS_OUT)


@triton.jit
def lamb_moments_kernel(
    grad, exp_avg, exp_avg_sq, grad_scale, numel, weight1, beta2, weight2,
    FROM_END: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    grads = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(grad_scale)
    first = tl.load(exp_avg + at, mask=inside, other=0.0)
    second = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    tl.store(exp_avg + at, lerp(first, grads, weight1, FROM_END), mask=inside)
    tl.store(exp_avg_sq + at, second * beta2 + (grads * weight2) * grads, mask=inside)


@triton.jit
def lamb_update(weights, exp_avg, exp_avg_sq, at, inside, correction1, correction2, eps, weight_decay):
    """LAMB's update before its trust ratio; 0 past the end of the tensor."""
    first = tl.math.div_rn(tl.load(exp_avg + at, mask=inside, other=0.0), correction1)
    second = tl.math.div_rn(tl.load(exp_avg_sq + at, mask=inside, other=0.0), correction2)
    return tl.math.div_rn(first, tl.math.sqrt_rn(second) + eps) + weight_decay * weights


@triton.jit(do_not_specialize=["count"])  # an offset: its divisibility would make two more variants and gain nothing
def lamb_squares_kernel(
    master, exp_avg, exp_avg_sq, groups, numel, count, correction1, correction2, eps, weight_decay,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Each program sums one group of weights and of updates, lane by lane as the reference does."""
    at = tl.program_id(0).to(tl.int64) * ROWS * LANES + tl.arange(0, LANES)
    of_weights = tl.zeros([LANES], dtype=tl.float64)
    of_update = tl.zeros([LANES], dtype=tl.float64)
    for row in range(ROWS):
        here = at + row * LANES
        inside = here < numel
        weights = tl.load(master + here, mask=inside, other=0.0).to(tl.float32)
        update = lamb_update(weights, exp_avg, exp_avg_sq, here, inside, correction1, correction2, eps, weight_decay)
        of_weights += weights.to(tl.float64) * weights.to(tl.float64)
        of_update += update.to(tl.float64) * update.to(tl.float64)
    tl.store(groups + tl.program_id(0), tl.sum(of_weights, axis=0))
    tl.store(groups + count + tl.program_id(0), tl.sum(of_update, axis=0))


@triton.jit(do_not_specialize_on_alignment=["ratio"])  # one number, anywhere in the tensor of all ratios
def lamb_kernel(
    master, exp_avg, exp_avg_sq, ratio, param_out, numel, correction1, correction2, eps, weight_decay, minus_lr,
    HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    weights = tl.load(master + at, mask=inside, other=0.0).to(tl.float32)
    update = lamb_update(weights, exp_avg, exp_avg_sq, at, inside, correction1, correction2, eps, weight_decay)
    weights += minus_lr * (update * tl.load(ratio))
    store_weights(weights, master, param_out, at, inside, HAS_OUT)
