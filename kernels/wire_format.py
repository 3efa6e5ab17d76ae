"""The block-wise format of quantised messages, in plain PyTorch: codes and their scales in one tensor of bytes.

[Note: symmetric codes] Each 256 elements (the last block may be shorter) have one fp32 scale: the largest magnitude
divided by L, 127 for 8 bits and 7 for 4. A code is the value divided by the scale, rounded to the nearest integer, ties
to even; it is read back as code * scale. The error of an element is at most half of the scale, up to three roundings of
fp32. 8-bit codes are signed bytes; 4-bit codes are stored with 8 added, two in a byte, the first one in the lower half.
A block that has a number that is not finite is read back as NaNs, so that a norm shows it.
"""

from __future__ import annotations

import torch

BLOCK_NUMEL = 256
LEVELS = {8: 127, 4: 7}
# Elements that are converted at a time, by type of device: multiples of BLOCK_NUMEL, which change no bits. They bound
# the memory that a conversion takes (counted by zero_runtime/predict/messages.py).
CHUNK_NUMEL = {"cpu": 1 << 16, "cuda": 1 << 22}


def packed_numel(numel: int, bits: int) -> int:
    """Bytes of `numel` elements, a multiple of 8, with their scales."""
    return _code_bytes(numel, bits) + 4 * -(-numel // BLOCK_NUMEL)


def quantise_(packed: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """Fill packed [packed_numel(n)] uint8 from values [n] (any float dtype). See [Note: symmetric codes]."""
    codes, scales = _split(packed, values.numel(), bits)
    for part in _chunks(values):
        blocks = _in_blocks(values[part].to(torch.float32))
        scale = blocks.abs().amax(1) / LEVELS[bits]
        found = (blocks / scale[:, None]).round_()
        found = torch.where(found.isnan(), 0.0, found).view(-1)[: values[part].numel()].to(torch.int8)
        if bits == 8:
            codes[part].copy_(found.view(torch.uint8))
        else:
            pairs = (found + 8).view(torch.uint8).view(-1, 2)
            codes[part.start // 2 : (part.start + found.numel()) // 2].copy_(pairs[:, 0] | (pairs[:, 1] << 4))
        first = part.start // BLOCK_NUMEL
        scales[first : first + scale.numel()].copy_(scale)


def dequantise_(values: torch.Tensor, packed: torch.Tensor, bits: int, *, adds: bool = False) -> None:
    """Read packed [packed_numel(n)] uint8 back into values [n] (any float dtype); with `adds` add to them, in fp32."""
    codes, scales = _split(packed, values.numel(), bits)
    for part in _chunks(values):
        numel = values[part].numel()
        if bits == 8:
            found = codes[part].view(torch.int8).to(torch.float32)
        else:
            pairs = codes[part.start // 2 : (part.start + numel) // 2]
            found = torch.stack((pairs & 15, pairs >> 4), 1).view(-1).to(torch.float32) - 8
        first, blocks = part.start // BLOCK_NUMEL, -(-numel // BLOCK_NUMEL)
        scale = scales[first : first + blocks].to(torch.float32)
        # 0 * inf is NaN, so a block with an infinite or missing scale has no finite number.
        read = (_in_blocks(found) * scale[:, None]).view(-1)[:numel]
        values[part].copy_(read.add_(values[part].to(torch.float32)) if adds else read)


def _code_bytes(numel: int, bits: int) -> int:
    assert numel % 8 == 0, f"{numel} elements: expected a multiple of 8, so that the scales begin at 4 bytes"
    return numel * bits // 8


def _split(packed: torch.Tensor, numel: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, uint8, and the scales, fp32; views."""
    codes = _code_bytes(numel, bits)
    return packed[:codes], packed[codes:].view(torch.float32)


def _chunks(values: torch.Tensor) -> list[slice]:
    size = CHUNK_NUMEL.get(values.device.type, max(values.numel(), BLOCK_NUMEL))
    return [slice(start, start + size) for start in range(0, values.numel(), size)]


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """The values as [blocks, 256], padded with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK_NUMEL))
    return padded.view(-1, BLOCK_NUMEL)


# ---- one bit ---------------------------------------------------------------------------------------------------------


def packed_signs_numel(numel: int) -> int:
    """Bytes of the signs of `numel` elements, a multiple of 32, and one scale."""
    assert numel % 32 == 0, f"{numel} elements: expected a multiple of 32, so that the scale begins at 4 bytes"
    return numel // 8 + 4


def write_signs_(packed: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Fill packed [packed_signs_numel(n)] uint8: a bit for each of values [n], set if it is not negative, the first one
    the lowest of its byte; then the scale, 0-dim fp32."""
    bits = (values >= 0).view(-1, 8).to(torch.uint8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=values.device)
    packed[:-4].copy_((bits * powers).sum(1, dtype=torch.uint8))
    packed[-4:].view(torch.float32).copy_(scale)


def read_signs_(values: torch.Tensor, packed: torch.Tensor) -> None:
    """Read packed back into values [n] fp32: the scale or its negative."""
    shifts = torch.arange(8, dtype=torch.uint8, device=values.device)
    bits = (packed[:-4, None] >> shifts) & 1
    values.copy_((bits.view(-1).to(torch.float32) * 2 - 1) * packed[-4:].view(torch.float32))
