"""Frozen weights as codes of 8 or 4 bits, in plain PyTorch.

[Note: weight codes]
Each 64 elements have one record of bytes: a bf16 scale, then their codes. The scale is the largest magnitude of the
block divided by L, 127 for 8 bits and 7 for 4, rounded to bf16; a code is the nearest integer to the element divided by
the scale, ties to even. So an element changes by at most half a scale. Codes of 8 bits are signed bytes; two codes of 4
bits share a byte, the first in its low half, each plus 8. A block holds elements of one parameter alone
(`FlatLayout.build`), so that the codes are those of any number of ranks.

Values that were read back have the same codes again, bit for bit, so that a checkpoint may hold them as numbers. A bf16
scale has 8 bits and a code at most 7, so that code * scale is exact in fp32. bf16 moves the scale by less than 2^-8,
which moves the code of the largest element by less than 127 / 256 < 1/2: it stays L, and gives the scale again. Codes
and scales are exact in bf16 too, where their product is rounded once.
"""

from __future__ import annotations

import torch

BLOCK_NUMEL = 64
SCALE_BYTES = 2
LEVELS = {8: 127, 4: 7}
# Elements that are encoded and read back at a time, by type of device: they bound the memory that it takes
# (zero_runtime/predict/messages.py counts it), and change no bits. A GPU reads more at a time: every gather reads, and
# the host starts some kernels for each part.
CHUNK_NUMEL = {"cpu": 1 << 16, "cuda": 1 << 22}
READ_NUMEL = {"cpu": 1 << 16, "cuda": 1 << 24}


def record_bytes(bits: int) -> int:
    """Bytes of one block: its scale and its codes."""
    return SCALE_BYTES + BLOCK_NUMEL * bits // 8


def stored_bytes(numel: int, bits: int) -> int:
    """Bytes of `numel` elements, a multiple of 64."""
    return numel // BLOCK_NUMEL * record_bytes(bits)


def encode_weights_(records: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """Fill records [stored_bytes(n)] uint8 from values [n], of any float dtype, n a multiple of 64. See [Note: weight
    codes]. A block with a number that is not finite is read back as NaNs."""
    size = CHUNK_NUMEL.get(values.device.type, values.numel())
    for start in range(0, values.numel(), size):
        part = values[start : start + size]
        first = stored_bytes(start, bits)
        _encode(records[first : first + stored_bytes(part.numel(), bits)].view(-1, record_bytes(bits)), part, bits)


def decode_weights_(values: torch.Tensor, records: torch.Tensor, bits: int) -> None:
    """Fill values [n], of any float dtype, from records: code * scale, rounded once."""
    size = READ_NUMEL.get(values.device.type, values.numel())
    for start in range(0, values.numel(), size):
        part = values[start : start + size]
        first = stored_bytes(start, bits)
        _decode(part, records[first : first + stored_bytes(part.numel(), bits)].view(-1, record_bytes(bits)), bits)


def _encode(records: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    blocks, largest = values.to(torch.float32).view(-1, BLOCK_NUMEL), LEVELS[bits]
    scales = (blocks.abs().amax(1, keepdim=True) / largest).to(torch.bfloat16)
    codes = (blocks / scales.to(torch.float32)).round_().clamp_(-largest, largest)
    codes = torch.where(codes.isnan(), 0.0, codes).to(torch.int8)  # of a block of zeros, or of a scale that is NaN
    records[:, :SCALE_BYTES].copy_(scales.view(torch.uint8))
    if bits == 8:
        records[:, SCALE_BYTES:].copy_(codes.view(torch.uint8))
    else:
        halves = (codes + 8).view(torch.uint8)
        records[:, SCALE_BYTES:].copy_(halves[:, 0::2] | (halves[:, 1::2] << 4))


def _decode(values: torch.Tensor, records: torch.Tensor, bits: int) -> None:
    codes = records[:, SCALE_BYTES:]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 2).view(-1, BLOCK_NUMEL).sub_(8)  # below 0 as in two's complement
    scales = records[:, :SCALE_BYTES].contiguous().view(torch.bfloat16)
    # Codes and scales are exact in bf16 and fp32; fp16 has no exponent for some scales, which multiply in fp32.
    read = values.view(-1, BLOCK_NUMEL).copy_(codes.view(torch.int8))
    read.mul_(scales.to(torch.promote_types(values.dtype, scales.dtype)))
