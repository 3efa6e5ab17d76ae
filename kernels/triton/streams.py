"""Kernels for accumulation, casts and sums of squares. reference.py specifies their results."""

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


@triton.jit(do_not_specialize=["count", "columns"])
def fold_kernel(sums, folded, count, columns, LEVELS: tl.constexpr):
    """Each program folds a column of a row of `count` numbers, padded with zeros to 2^LEVELS * columns, in halves.

    Programs are numbered by column and row. A row's second half is added to its first until `columns` numbers are left,
    as in the reference. The zeros change no number, so every length has the bits of its own power of two. Not
    specialized: every length uses one variant.
    """
    column, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, 1 << LEVELS).to(tl.int64) * columns + column
    numbers = tl.load(sums + row * count + at, mask=at < count, other=0.0)
    for level in tl.static_range(1, LEVELS + 1):
        numbers = tl.sum(tl.reshape(numbers, [2, 1 << (LEVELS - level)]), axis=0)
    tl.store(folded + row * columns + column + tl.arange(0, 1), numbers)
