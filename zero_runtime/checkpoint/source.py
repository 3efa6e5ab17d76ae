"""What a runtime can be filled from: whole tensors by parameter name and state, read in ranges."""

from __future__ import annotations

from typing import Protocol

import torch

MASTER = "master"  # the weight itself; every other state is the optimizer's


class TensorSource(Protocol):
    """A checkpoint of ours, a folder of weights or another library's checkpoint."""

    def states(self) -> tuple[str, ...]:
        """`master`, and the optimizer's states where there are any."""
        ...

    def names(self) -> tuple[str, ...]:
        """Parameters by full name; a tied one once, by the name of its owner."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str, state: str = MASTER) -> torch.dtype: ...

    def read(self, name: str, state: str, start: int, stop: int) -> torch.Tensor:
        """[stop - start] elements of the flattened tensor, on the CPU."""
        ...
