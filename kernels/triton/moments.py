"""AdamW with 8-bit moments in one pass over memory. See [Note: dynamic codes] in block_formats.py for the format."""

from __future__ import annotations

import triton
import triton.language as tl
from zero_runtime.kernels.triton.updates import lerp, store_weights


@triton.jit
def read_codes(codes, scales, table, at, inside, block, blocks):
    """[rows, 256]: the values of the codes; 0 past the end of the tensor."""
    scale = tl.load(scales + block, mask=block < blocks, other=0.0)
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    return tl.where(inside, tl.load(table + code) * scale[:, None], 0.0)


@triton.jit
def write_codes(
    values, codes, scales, borders, at, inside, block, blocks,
    LINES: tl.constexpr, ZERO: tl.constexpr, LAST: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Store each value's nearest code: the number of the 255 borders between codes that are below it.

    A line through the codes of its decade (`code_lines`) gives that number or one more, and one border decides: a
    search among the borders would read eight, and reading them takes longer than all other memory. ZERO: the code of
    0; LAST: how many codes lie between 0 and 1.
    """
    most, least = tl.max(values, axis=1), tl.min(values, axis=1)
    bad = tl.max((values != values).to(tl.int32), axis=1)  # a NaN makes the block's scale NaN, as in the reference
    scale = tl.where(bad > 0, float("nan"), tl.where(most >= -least, most, least))
    tl.store(scales + block, scale, mask=block < blocks)
    share = tl.math.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    size = tl.abs(share)
    slope, offset = tl.full(share.shape, LINES[0][1], tl.float32), tl.full(share.shape, LINES[0][2], tl.float32)
    for decade in tl.static_range(1, 7):
        slope = tl.where(size >= LINES[decade][0], LINES[decade][1], slope)
        offset = tl.where(size >= LINES[decade][0], LINES[decade][2], offset)
    # A NaN's number is any; its code is replaced below.
    count = tl.minimum(tl.maximum((slope * size + offset).to(tl.int32), 1), LAST)
    code = tl.where(share < 0, ZERO - count, ZERO + count - 1)
    code += (tl.load(borders + code) < share).to(tl.int32) + (tl.load(borders + 254) < share).to(tl.int32)
    code = tl.where(share != share, ZERO, code)
    if KEEPS:  # a second moment above 0 gets at least code 1
        code += ((code == 0) & (values > 0)).to(tl.int32)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)


@triton.jit
def adamw8bit_kernel(
    master, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, grad_scale, param_out, numel, blocks,
    signed, signed_borders, unsigned, unsigned_borders,
    decay, l2, weight1, beta2, weight2, correction, eps, minus_step_size,
    HAS_OUT: tl.constexpr, FROM_END: tl.constexpr, L2: tl.constexpr, ZERO: tl.constexpr,
    SIGNED_LINES: tl.constexpr, UNSIGNED_LINES: tl.constexpr, ROWS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """One update; each row is a block of the format."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * PER + tl.arange(0, PER)[None, :]
    inside = at < numel
    weights = tl.load(master + at, mask=inside, other=0.0).to(tl.float32)
    grads = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(grad_scale)
    first = read_codes(exp_avg, exp_avg_scale, signed, at, inside, block, blocks)
    second = read_codes(exp_avg_sq, exp_avg_sq_scale, unsigned, at, inside, block, blocks)
    if L2:
        grads += l2 * weights
    else:
        weights *= decay
    first = lerp(first, grads, weight1, FROM_END)
    second = second * beta2 + (grads * weight2) * grads
    weights += tl.math.div_rn(minus_step_size * first, tl.math.div_rn(tl.math.sqrt_rn(second), correction) + eps)
    write_codes(
        first, exp_avg, exp_avg_scale, signed_borders, at, inside, block, blocks, SIGNED_LINES, ZERO, 127, False
    )
    write_codes(
        second, exp_avg_sq, exp_avg_sq_scale, unsigned_borders, at, inside, block, blocks, UNSIGNED_LINES, 0, 254, True
    )
    store_weights(weights, master, param_out, at, inside, HAS_OUT)
