"""Which elements of the model's parameters this rank holds, before they are sharded: here all of them.

Tensor parallelism (the wing parallel/tensor) divides some parameters over a group of consecutive ranks, and gives the
units a subclass. The trunk knows only this contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from zero_runtime.flat_layout import Piece, Segment
from zero_runtime.tensor_source import ReadInto


class SliceSpan(NamedTuple):
    """`numel` consecutive elements, from `full` on of the flattened full parameter and from `local` on of the flattened
    slice of `rank`."""

    rank: int
    full: int
    local: int
    numel: int


class DividedParameter(Protocol):
    """How one parameter is divided into `degree` slices along `dim`, in each of its `parts`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dim(self) -> int: ...
    @property
    def parts(self) -> tuple[int, ...]: ...
    @property
    def degree(self) -> int: ...
    @property
    def local_numel(self) -> int: ...
    def spans_of_full(self, start: int, stop: int) -> Iterator[SliceSpan]: ...
    def cut(self, full: torch.Tensor, rank: int) -> torch.Tensor: ...
    def join(self, slices: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Slices:
    """What this rank holds of the model's parameters: here all elements of each.

    rank, degree: this rank's place in its group, and the group's size. splits: the divided parameters by name. summed:
    replicated parameters that divided computations use, so that their gradients are summed over the group.
    axis: the group, for sums and gathers of these two (parallel/tensor/axis.py).
    """

    rank: int = 0
    degree: int = 1
    splits: Mapping[str, DividedParameter] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    axis: Any = field(default=None, compare=False)

    def local_shape(self, _name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this rank's tensor of a parameter of this full shape."""
        return tuple(shape)

    def counts_here(self, _name: str) -> bool:
        """Whether a sum over all ranks takes this rank's elements: of replicas, only those of the first rank count."""
        return True

    def counted(self, _pieces: Sequence[Piece], low: int, high: int) -> list[tuple[int, int]]:
        """The ranges of elements [low, high) of a shard with these pieces that a sum over all ranks takes."""
        return [(low, high)]

    def spans(self, _name: str, start: int, stop: int) -> Iterator[SliceSpan]:
        """Where elements [start, stop) of this rank's flattened tensor are in the full parameter; without padding."""
        return iter((SliceSpan(self.rank, start, start, stop - start),))

    def cut(self, _name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full parameter."""
        return full

    def join(self, segment: Segment, own: torch.Tensor) -> torch.Tensor:
        """The full tensor of a parameter, of which `own` [numel] is this rank's part. A collective if it is divided."""
        return own.view(segment.shape)

    def fill(self, name: str, start: int, target: torch.Tensor, read_into: ReadInto) -> None:
        """Fill the 1-D `target` with elements of this rank's tensor of a parameter, from its element `start` on.
        `read_into` is asked for elements of the full parameter."""
        for span in self.spans(name, start, start + target.numel()):
            read_into(name, span.full, target[span.local - start : span.local - start + span.numel])


WHOLE = Slices()
