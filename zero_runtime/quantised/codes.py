"""Gathers of codes, of shards that are stored exactly."""

from __future__ import annotations

import torch

from zero_runtime.codec import Codec
from zero_runtime.kernels.wire_format import dequantise_, packed_numel, quantise_
from zero_runtime.wire import BITS


class SentCodes(Codec):
    """Every shard, this rank's included, gets the values of its codes, rounded to `dtype`."""

    def __init__(self, code: str, dtype: torch.dtype, shard_count: int) -> None:
        self._bits, self._dtype, self._shard_count = BITS[code], dtype, shard_count

    def encode(self, shard: torch.Tensor) -> torch.Tensor:
        codes = torch.empty(packed_numel(shard.numel(), self._bits), dtype=torch.uint8, device=shard.device)
        quantise_(codes, shard, self._bits)
        return codes

    def decode(self, full: torch.Tensor, sent: torch.Tensor) -> None:
        for values, codes in zip(full.chunk(self._shard_count), sent.chunk(self._shard_count), strict=True):
            self._read(values, codes)

    def round_(self, full: torch.Tensor) -> None:
        for values in full.chunk(self._shard_count):
            self._read(values, self.encode(values))

    def _read(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        if values.dtype == self._dtype:
            dequantise_(values, codes, self._bits)
            return
        rounded = torch.empty(values.numel(), dtype=self._dtype, device=values.device)
        dequantise_(rounded, codes, self._bits)
        values.copy_(rounded)
