"""The block-wise 8-bit format of Adam's moments, in plain PyTorch. See reference.py.

[Note: blocks] Each 256 elements of a flat tensor (the last block may be shorter) have one fp32 scale.

[Note: dynamic codes] Moments span many magnitudes within a block. Their codes are indices into a table of 256 values in
[-1, 1] (the first moment) or [0, 1] (the second): seven decades, each half as densely filled as the next (arXiv
2110.02861, section 2.2). A second moment above 0 never becomes 0, because the step is divided by its root. The scale is
the element of the largest magnitude itself, with its sign (the positive one if both signs occur), so that this element
has the code of 1 and is read back exactly. Hence values that are read and written back get the same codes and scale:
every other value is its table value times the scale, rounded; divided by the scale again, it lies within 2^-23 of the
table value, far less than half the distance to the next one. (This holds as long as the products are normal numbers;
scales of at least 2^-100 suffice.)
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

BLOCK_NUMEL = 256
CODES = 256
DECADES = 7


def blocks_of(numel: int) -> int:
    """The number of blocks, and so of scales, of `numel` elements."""
    return -(-numel // BLOCK_NUMEL)


@cache
def _dynamic_values(*, signed: bool) -> tuple[float, ...]:
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade + (0 if signed else 1))
        edges = [0.1 + 0.9 * place / count for place in range(count + 1)]
        means = [10.0 ** (decade + 1 - DECADES) * (low + high) / 2 for low, high in pairwise(edges)]
        values += means + ([-mean for mean in means] if signed else [])
    return tuple(sorted(values))


def code_lines(*, signed: bool) -> tuple[tuple[float, float, float], ...]:
    """For each decade its least magnitude, and the slope and the offset of a line through its codes.

    Within a decade the borders between codes are equally far apart, so that floor(slope * magnitude + offset) counts
    the borders above 0 that are below a magnitude, or one more: at the start of a decade the border before its first
    code is higher than the line says, and the offset has a thousandth of a code more than the line, so that rounding
    makes the number no smaller. Past the last decade's middle one border is left, before the code of 1.
    """
    lines, first = [], 1
    for decade in range(DECADES):
        count, end = 2 ** (decade + (0 if signed else 1)), 10.0 ** (decade + 1 - DECADES)
        lines.append((end / 10, count / (0.9 * end), first - count / 9 + 1e-3))
        first += count
    return tuple(lines)


def dynamic_codes(device: torch.device, *, signed: bool) -> torch.Tensor:
    """[256] fp32, ascending: the values of the codes. See [Note: dynamic codes]."""
    return torch.tensor(_dynamic_values(signed=signed), dtype=torch.float32, device=device)


ZERO_CODE = _dynamic_values(signed=True).index(0.0)  # the code of 0 in a first moment; in a second moment it is 0


def read_dynamic(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """[n] fp32: the values of codes [n] uint8 and scales [blocks] fp32. See [Note: dynamic codes]."""
    values = dynamic_codes(codes.device, signed=signed)[codes.to(torch.int64)]
    return (_in_blocks(values) * scales[:, None]).view(-1)[: codes.numel()].contiguous()


def write_dynamic(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
    """Fill codes [n] uint8 and scales [blocks] fp32. See [Note: dynamic codes].

    Each code is the nearest one; of two equally near ones, the lower.
    """
    table = dynamic_codes(values.device, signed=signed)
    blocks = _in_blocks(values)
    most, least = blocks.amax(1), blocks.amin(1)
    scale = torch.where(most >= -least, most, least)
    share = blocks / scale[:, None]
    found = torch.bucketize(share, (table[:-1] + table[1:]) / 2)
    zero = ZERO_CODE if signed else 0
    found = torch.where(share.isnan(), zero, found).view(-1)[: codes.numel()]
    # A second moment above 0 gets at least code 1, since the step is divided by its root.
    codes.copy_(found if signed else found + ((found == 0) & (values > 0)))
    scales.copy_(scale)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """The values as [blocks, 256], padded with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK_NUMEL))
    return padded.view(blocks_of(values.numel()), BLOCK_NUMEL)
