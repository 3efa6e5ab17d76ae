"""Triton kernels with the faults that test_cubins.py must report. Imported by its tests, because it needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow_kernel(target, values, numel, BLOCK: tl.constexpr):
    """The offset of an element has 32 bits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(values + at, mask=at < numel), mask=at < numel)


@triton.jit
def approximate_kernel(target, values, numel, BLOCK: tl.constexpr):
    """The quotient is not correctly rounded."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, 3.0 / tl.load(values + at, mask=at < numel), mask=at < numel)
