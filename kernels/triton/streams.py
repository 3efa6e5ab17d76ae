"""Kernels for accumulation, casts, sums of squares and the integer formats. reference.py specifies their results."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accumulate_kernel(target, values, numel, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    sums = tl.load(target + at, mask=inside, other=0.0).to(tl.float32)
    sums += scale * tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + at, sums.to(target.dtype.element_ty), mask=inside)


@triton.jit
def cast_copy_kernel(target, values, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    wide = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + at, wide.to(target.dtype.element_ty), mask=inside)


@triton.jit
def squares_kernel(values, groups, numel, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Each program sums one group, lane by lane as the reference does; the compiler chooses the order of the lanes."""
    at = tl.program_id(0).to(tl.int64) * ROWS * LANES + tl.arange(0, LANES)
    lanes = tl.zeros([LANES], dtype=tl.float64)
    for row in range(ROWS):
        here = at + row * LANES
        wide = tl.load(values + here, mask=here < numel, other=0.0).to(tl.float32).to(tl.float64)
        lanes += wide * wide
    tl.store(groups + tl.program_id(0), tl.sum(lanes, axis=0))


@triton.jit
def scale_of(first, second, top):
    """[rows]: the largest magnitude in two tensors [rows, n], divided by `top`; NaN if one of the elements is NaN."""
    both = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    bad = tl.max((first != first).to(tl.int32), axis=1) + tl.max((second != second).to(tl.int32), axis=1)
    return tl.where(bad > 0, float("nan"), tl.math.div_rn(both, top))


@triton.jit
def integers_of(values, scale, top):
    """values / scale rounded to the nearest integer, ties to even; 0 where the quotient is not finite.

    Adding 1.5 * 2^23 rounds to an integer, since an fp32 number of that size has no bits for a fraction.
    """
    share = tl.math.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    usable = tl.abs(share) <= 3.4028234663852886e38
    kept = tl.minimum(tl.maximum(tl.where(usable, share, 0.0), -top), top)
    return ((kept + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def quantise_kernel(
    codes, scales, values, numel, blocks, top, BITS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """Each row is a block, loaded as two halves: its even and its odd elements."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    even = block[:, None] * (2 * HALF) + 2 * tl.arange(0, HALF)[None, :]
    odd = even + 1
    low = tl.load(values + even, mask=even < numel, other=0.0).to(tl.float32)
    high = tl.load(values + odd, mask=odd < numel, other=0.0).to(tl.float32)
    scale = scale_of(low, high, top)
    tl.store(scales + block, scale, mask=block < blocks)
    low_code = integers_of(low, scale, top)
    high_code = integers_of(high, scale, top)
    if BITS == 8:
        tl.store(codes + even, low_code.to(tl.int8), mask=even < numel)
        tl.store(codes + odd, high_code.to(tl.int8), mask=odd < numel)
    else:
        pair = (low_code & 15) | ((high_code & 15) << 4)
        tl.store(codes + even // 2, pair.to(tl.uint8), mask=even < numel)


@triton.jit
def dequantise_kernel(target, codes, scales, numel, BITS: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    if BITS == 8:
        code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    else:
        pair = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
        code = (((pair >> ((at % 2) * 4).to(tl.int32)) & 15) ^ 8) - 8
    wide = code.to(tl.float32) * tl.load(scales + at // PER, mask=inside, other=0.0)
    tl.store(target + at, wide.to(target.dtype.element_ty), mask=inside)
