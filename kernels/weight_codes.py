"""Block-wise codes of weights in 8 or 4 bits, in plain PyTorch.

[Note: weight codes] Each 64 elements have one record of bytes: an fp32 scale, then their codes. The scale is the
largest magnitude of the block divided by the largest code (127 or 7); a code is the nearest integer to the element
divided by the scale, ties to even. So an element changes by at most half a scale: 1/254 or 1/14 of the block's largest
magnitude, up to rounding in fp32. Two codes of 4 bits share a byte, the first in its low half, each plus 8. The bits
are the same for any number of ranks, because a block holds elements of one parameter only (FlatLayout.build).
"""

from __future__ import annotations

import torch

BLOCK_NUMEL = 64
SCALE_BYTES = 4
_LARGEST = {8: 127, 4: 7}


def record_bytes(bits: int) -> int:
    """Bytes of one block: its scale and its codes."""
    return SCALE_BYTES + BLOCK_NUMEL * bits // 8


def encode_weights(values: torch.Tensor, packed: torch.Tensor, *, bits: int) -> None:
    """Fill packed [n / 64 * record_bytes] uint8 from values [n], any float dtype, n a multiple of 64; see [Note: weight
    codes]. Values must be finite."""
    blocks = values.to(torch.float32).view(-1, BLOCK_NUMEL)
    largest = _LARGEST[bits]
    scales = blocks.abs().amax(1, keepdim=True) / largest
    codes = torch.where(scales > 0, blocks / scales, 0.0).round_().clamp_(-largest, largest).to(torch.int8)
    records = packed.view(-1, record_bytes(bits))
    records[:, :SCALE_BYTES].copy_(scales.view(torch.uint8))
    if bits == 8:
        records[:, SCALE_BYTES:].copy_(codes.view(torch.uint8))
    else:
        halves = (codes + 8).view(torch.uint8)
        records[:, SCALE_BYTES:].copy_(halves[:, 0::2] | (halves[:, 1::2] << 4))


def decode_weights(packed: torch.Tensor, values: torch.Tensor, *, bits: int) -> None:
    """Fill values [n], any float dtype, from packed [n / 64 * record_bytes] uint8: code x scale in fp32, rounded."""
    records = packed.view(-1, record_bytes(bits))
    scales = records[:, :SCALE_BYTES].contiguous().view(torch.float32)
    stored = records[:, SCALE_BYTES:]
    if bits == 8:
        codes = stored.contiguous().view(torch.int8).to(torch.float32)
    else:
        codes = torch.stack((stored & 15, stored >> 4), 2).view(-1, BLOCK_NUMEL).to(torch.float32) - 8
    values.view(-1, BLOCK_NUMEL).copy_(codes * scales)
