"""A state that is held as 8-bit codes, as whoever wants numbers sees it: fp32 by range, in and out.

What is read and written again has the same codes and scales ([Note: dynamic codes] in kernels/block_formats.py), and
blocks hold the same elements of a parameter everywhere (FlatLayout.build). So as fp32 numbers they lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_runtime.kernels.block_formats import BLOCK_NUMEL, blocks_of, read_dynamic, write_dynamic

Read = Callable[[int, int], torch.Tensor]  # elements [start, stop) of a tensor that may rest elsewhere


class CodedShard:
    """[S] elements: codes [S] uint8 and scales [S / 256] fp32, both the optimizer's own. `signed`: which table."""

    dtype = torch.float32

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
        self._codes, self._scales, self._signed = codes, scales, signed

    def values(self) -> torch.Tensor:
        """[S] fp32, a copy."""
        return self.read(0, self._codes.numel())

    def read(self, start: int, stop: int, codes: Read | None = None, scales: Read | None = None) -> torch.Tensor:
        """Elements [start, stop) in fp32, a copy. `codes`, `scales`: how those are read where they rest elsewhere."""
        first = start // BLOCK_NUMEL
        low = first * BLOCK_NUMEL
        found = codes(low, stop) if codes else self._codes[low:stop]
        of_blocks = scales(first, blocks_of(stop)) if scales else self._scales[first : blocks_of(stop)]
        return read_dynamic(found, of_blocks, signed=self._signed)[start - low :]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Take fp32 values for the elements from `start`, the first of a block, on; to the end of a block, what lies
        behind them (padding, if anything) becomes zero."""
        blocks = blocks_of(values.numel())
        numel, first = blocks * BLOCK_NUMEL, start // BLOCK_NUMEL
        assert start == first * BLOCK_NUMEL, f"{start} is inside a block"
        whole = torch.nn.functional.pad(values.to(self._codes.device), (0, numel - values.numel()))
        codes, scales = self._codes[start : start + numel], self._scales[first : first + blocks]
        write_dynamic(whole, codes, scales, signed=self._signed)
