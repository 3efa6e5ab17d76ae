"""Where values for a runtime's shards come from: one state of every parameter, read by range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class TensorSource(Protocol):
    """One state (the weights, or one of an optimizer's) of parameters by name.

    A checkpoint of ours, a folder of another library's and a dict in memory are all this; `load.fill` asks no more.
    """

    def names(self) -> Sequence[str]:
        """The parameters that it has values for."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole parameter's shape."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """What `read` gives."""
        ...

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened parameter: 1-D, on the CPU, the caller's. Reads little more."""
        ...
