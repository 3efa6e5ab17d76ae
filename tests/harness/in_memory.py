"""A source of tensors that are in memory."""

from __future__ import annotations

import torch


class InMemory:
    """A TensorSource of values in memory, by name."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values = values

    def names(self) -> list[str]:
        return list(self._values)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._values[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._values[name].dtype

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._values[name].reshape(-1)[start:stop].clone()
