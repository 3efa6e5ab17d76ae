"""The interface of sources that provide values for a runtime's shards, by parameter and range of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


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
