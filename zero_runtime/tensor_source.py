"""The interface of sources that provide values for a runtime's shards, by parameter and range of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from zero_runtime.flat_layout import READ_NUMEL

# Fills a 1-D tensor with elements of a parameter: `read_into(name, start, target)`.
ReadInto = Callable[[str, int, torch.Tensor], object]


class TensorSource(Protocol):
    """One state (the weights, or one optimizer state) of parameters, by name.

    Implemented by the runtime's checkpoints, by folders of other libraries and by dictionaries in memory. `load.fill`
    needs only this interface.
    """

    def names(self) -> Sequence[str]:
        """Names of the parameters that the source has values for."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full parameter."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensors that `read` returns."""
        ...

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened parameter, as a 1-D CPU tensor that the caller owns.

        Reads little more than this range.
        """
        ...


class Renamed:
    """Some tensors of a source under other names: a TensorSource."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = dict(names)  # ours: theirs

    def names(self) -> Sequence[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._names[name])

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._source.read(self._names[name], start, stop)


def read_in_blocks(source: TensorSource, name: str, start: int, target: torch.Tensor) -> None:
    """Fill the 1-D `target` with elements of the source from `start` on, READ_NUMEL at a time."""
    for block in target.split(READ_NUMEL):
        block.copy_(source.read(name, start, start + block.numel()))
        start += block.numel()


def reads_from(values: dict[str, torch.Tensor]) -> ReadInto:
    """A source of elements in full parameters, given by name."""

    def read_into(name: str, start: int, target: torch.Tensor) -> None:
        target.copy_(values[name].reshape(-1)[start : start + target.numel()])

    return read_into
