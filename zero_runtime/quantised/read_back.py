"""A source of weights with the values that a run has which stores some of them as codes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from zero_runtime.kernels.weight_codes import BLOCK_NUMEL, decode_weights_, encode_weights_, stored_bytes
from zero_runtime.precision import CODE_BITS, WeightCode
from zero_runtime.tensor_source import TensorSource


class ReadBack:
    """`source`, with the parameters in `coded` as they are read back from codes, in fp32: a TensorSource."""

    def __init__(self, source: TensorSource, coded: Collection[str], code: WeightCode) -> None:
        self._source, self._coded, self._bits = source, coded, CODE_BITS[code]

    def names(self) -> Sequence[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._coded else self._source.dtype(name)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._coded:
            return self._source.read(name, start, stop)
        first = start // BLOCK_NUMEL * BLOCK_NUMEL  # a block of the parameter has one scale
        last = min(-(-stop // BLOCK_NUMEL) * BLOCK_NUMEL, math.prod(self.shape(name)))
        values = torch.zeros(-(-(last - first) // BLOCK_NUMEL) * BLOCK_NUMEL)
        values[: last - first].copy_(self._source.read(name, first, last))
        codes = torch.empty(stored_bytes(values.numel(), self._bits), dtype=torch.uint8)
        encode_weights_(codes, values, self._bits)
        decode_weights_(values, codes, self._bits)
        return values[start - first : stop - first]
