"""Reads and writes ranges of an optimizer state that is stored in fewer bits, as fp32 values.

A state in bf16 is widened and rounded again, which changes no bits. For states of 8-bit codes: values that are read and
written again get the same codes and scales ([Note: dynamic codes] in kernels/block_formats.py), and blocks hold the
same elements of a parameter in every layout (FlatLayout.build). So the conversion to fp32 and back loses nothing. If
blocks followed the shards instead, no padding between parameters would be needed, but the bits would depend on the
world size, and each resume with another one would lose some.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_runtime.kernels.block_formats import BLOCK_NUMEL, blocks_of, read_dynamic, write_dynamic

Read = Callable[[int, int], torch.Tensor]  # reads elements [start, stop) of a tensor that may be offloaded


class CodedShard:
    """[S] elements: codes [S] uint8 and scales [S / 256] fp32, both owned by the optimizer. `signed`: which table."""

    dtype = torch.float32

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
        self._codes, self._scales, self._signed = codes, scales, signed

    def values(self) -> torch.Tensor:
        """[S] fp32, a copy."""
        return self.read(0, self._codes.numel())

    def read(self, start: int, stop: int, codes: Read | None = None, scales: Read | None = None) -> torch.Tensor:
        """Elements [start, stop) in fp32, a copy. `codes`, `scales`: functions that read these if offloaded."""
        first = start // BLOCK_NUMEL
        low = first * BLOCK_NUMEL
        found = codes(low, stop) if codes else self._codes[low:stop]
        of_blocks = scales(first, blocks_of(stop)) if scales else self._scales[first : blocks_of(stop)]
        return read_dynamic(found, of_blocks, signed=self._signed)[start - low :]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Write fp32 values to the elements from `start` on, which must be the first of a block. The remaining elements
        of the last block (padding, if there are any) become zero."""
        blocks = blocks_of(values.numel())
        numel, first = blocks * BLOCK_NUMEL, start // BLOCK_NUMEL
        assert start == first * BLOCK_NUMEL, f"{start} is inside a block"
        whole = torch.nn.functional.pad(values.to(self._codes.device), (0, numel - values.numel()))
        codes, scales = self._codes[start : start + numel], self._scales[first : first + blocks]
        write_dynamic(whole, codes, scales, signed=self._signed)


class RoundedShard:
    """[S] elements in a 16-bit dtype, owned by the optimizer."""

    dtype = torch.float32

    def __init__(self, rounded: torch.Tensor) -> None:
        self._rounded = rounded

    def values(self) -> torch.Tensor:
        """[S] fp32, a copy."""
        return self._rounded.to(torch.float32)

    def read(self, start: int, stop: int, rounded: Read | None = None) -> torch.Tensor:
        """Elements [start, stop) in fp32, a copy. `rounded`: a function that reads them if offloaded."""
        return (rounded(start, stop) if rounded else self._rounded[start:stop]).to(torch.float32)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Round fp32 values into the elements from `start` on."""
        self._rounded[start : start + values.numel()].copy_(values)
