"""Block-wise 8-bit and 4-bit formats, and Adam on 8-bit moments, in plain PyTorch. See reference.py.

[Note: blocks] Each 256 elements of a flat tensor (the last block may be shorter) have one fp32 scale.

[Note: integers] The scale is the largest magnitude / 127 (8 bits) or / 7 (4 bits), a code the nearest integer of
value / scale, ties to even. 4-bit codes are two's complement, two a byte, the even element in the lower half; an odd
end leaves the upper half 0. A block with a NaN or infinity has a scale that is none either, and comes back as NaN.

[Note: dynamic codes] Moments span many magnitudes within a block. Their codes are places in a table of 256 values in
[-1, 1] (the first moment) or [0, 1] (the second): seven decades, each half as densely filled as the next (arXiv
2110.02861, section 2.2). A second moment above 0 never becomes 0, because the step is divided by its root. The scale is
the element of the largest magnitude itself, with its sign (the positive one of two), so that this element has the code
of 1 and comes back exactly. Hence what was read and is written again has the same codes and scale: another value is
its code's times the scale, rounded, and divided by the scale again lies within 2^-23 of its code's, far less than half
the way to the next. (As long as the products are normal numbers; scales from 2^-100 on are enough.)
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

BLOCK_NUMEL = 256
CODES = 256
DECADES = 7


def blocks_of(numel: int) -> int:
    """How many blocks, and so scales, `numel` elements have."""
    return -(-numel // BLOCK_NUMEL)


def codes_numel(numel: int, bits: int) -> int:
    """How many 8-bit numbers hold the codes of `numel` elements."""
    return numel if bits == 8 else -(-numel // 2)


def quantise(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """Fill codes (int8 [n], or uint8 [(n + 1) // 2] for 4 bits) and scales [blocks] fp32. See [Note: integers]."""
    numel, top = values.numel(), 127.0 if bits == 8 else 7.0
    blocks = _in_blocks(values.to(torch.float32))
    scale = blocks.abs().amax(1) / top
    whole = torch.round(blocks / scale[:, None])
    whole = torch.where(whole.isfinite(), whole.clamp(-top, top), 0.0).to(torch.int8).view(-1)[: numel + numel % 2]
    scales.copy_(scale)
    if bits == 8:
        codes.copy_(whole[:numel])
    else:
        pairs = (whole.to(torch.int16) & 15).view(-1, 2)
        codes.copy_(pairs[:, 0] | pairs[:, 1] << 4)


def dequantise(target: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """target [n] of any float dtype = codes * scales. See [Note: integers]."""
    if bits == 4:
        halves = torch.stack([codes & 15, codes >> 4], 1).view(-1)[: target.numel()]
        codes = (halves.to(torch.int16) ^ 8) - 8
    wide = _in_blocks(codes.to(torch.float32)) * scales[:, None]
    target.copy_(wide.view(-1)[: target.numel()])


@cache
def _dynamic_values(*, signed: bool) -> tuple[float, ...]:
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade + (0 if signed else 1))
        edges = [0.1 + 0.9 * place / count for place in range(count + 1)]
        means = [10.0 ** (decade + 1 - DECADES) * (low + high) / 2 for low, high in pairwise(edges)]
        values += means + ([-mean for mean in means] if signed else [])
    return tuple(sorted(values))


def dynamic_codes(device: torch.device, *, signed: bool) -> torch.Tensor:
    """[256] fp32, ascending: what the codes stand for. See [Note: dynamic codes]."""
    return torch.tensor(_dynamic_values(signed=signed), dtype=torch.float32, device=device)


ZERO_CODE = _dynamic_values(signed=True).index(0.0)  # of a first moment; a second moment's is 0


def read_dynamic(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """[n] fp32: the values behind codes [n] uint8 and scales [blocks] fp32. See [Note: dynamic codes]."""
    values = dynamic_codes(codes.device, signed=signed)[codes.to(torch.int64)]
    return (_in_blocks(values) * scales[:, None]).view(-1)[: codes.numel()].contiguous()


def write_dynamic(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
    """Fill codes [n] uint8, the nearest (the lower of two), and scales [blocks] fp32. See [Note: dynamic codes]."""
    table = dynamic_codes(values.device, signed=signed)
    blocks = _in_blocks(values)
    most, least = blocks.amax(1), blocks.amin(1)
    scale = torch.where(most >= -least, most, least)
    share = blocks / scale[:, None]
    found = torch.bucketize(share, (table[:-1] + table[1:]) / 2)
    zero = ZERO_CODE if signed else 0
    found = torch.where(share.isnan(), zero, found).view(-1)[: codes.numel()]
    codes.copy_(found if signed else found + ((found == 0) & (values > 0)))
    scales.copy_(scale)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """[blocks, 256], with zeros at the end of the last."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK_NUMEL))
    return padded.view(blocks_of(values.numel()), BLOCK_NUMEL)
