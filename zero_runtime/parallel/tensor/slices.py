"""Which elements of a parameter each rank of a tensor-parallel group holds. Standard library only.

[Note: slices]
A split parameter is divided along one dimension. If it holds several matrices one after another along that dimension
(`parts`, as a fused query, key and value), each of them is divided, and a rank holds its slice of each. All ranks hold
slices of one shape: where `degree` does not divide a vocabulary, the last ranks hold rows of padding, which are zero,
have no gradient, and belong to no element of the full parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class SliceSpan(NamedTuple):
    """`numel` consecutive elements, from `full` on of the flattened full parameter and from `local` on of the flattened
    slice of `rank`."""

    rank: int
    full: int
    local: int
    numel: int


@dataclass(frozen=True)
class Split:
    """How one parameter is divided into `degree` slices; see [Note: slices].

    shape: that of the full parameter. parts: sizes along `dim`, whose sum is shape[dim].
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...]
    degree: int

    def __post_init__(self) -> None:
        assert sum(self.parts) == self.shape[self.dim], f"parts {self.parts} of shape {self.shape}"
        uneven = [size for size in self.parts if size % self.degree]
        assert not uneven or len(self.parts) == 1, f"{self.degree} slices of fused parts {self.parts}"

    @cached_property
    def local_parts(self) -> tuple[int, ...]:
        """Sizes of one slice along `dim`, padding included."""
        return tuple(-(-size // self.degree) for size in self.parts)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], sum(self.local_parts), *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        """Number of elements of one slice, padding included."""
        return math.prod(self.local_shape)

    def valid(self, rank: int, part: int = 0) -> int:
        """Size of this rank's slice of one part along `dim`, without padding."""
        own = self.local_parts[part]
        return min(max(self.parts[part] - rank * own, 0), own)

    def spans_of_slice(self, rank: int, start: int, stop: int) -> Iterator[SliceSpan]:
        """Where elements [start, stop) of this rank's flattened slice are in the full parameter; without padding."""
        width = self.local_shape[self.dim] * self._inner
        for row in range(start // width, -(-stop // width)) if start < stop else ():
            for span in self._spans_of_row(row, rank):
                low, high = max(span.local, start), min(span.local + span.numel, stop)
                if low < high:
                    yield SliceSpan(rank, span.full + low - span.local, low, high - low)

    def spans_of_full(self, start: int, stop: int) -> Iterator[SliceSpan]:
        """The slices that hold elements [start, stop) of the flattened full parameter, in order of the elements."""
        width = self.shape[self.dim] * self._inner
        for row in range(start // width, -(-stop // width)) if start < stop else ():
            every = [span for rank in range(self.degree) for span in self._spans_of_row(row, rank)]
            for span in sorted(every, key=lambda one: one.full):
                low, high = max(span.full, start), min(span.full + span.numel, stop)
                if low < high:
                    yield SliceSpan(span.rank, low, span.local + low - span.full, high - low)

    @cached_property
    def _inner(self) -> int:
        """Number of elements of one index along `dim`."""
        return math.prod(self.shape[self.dim + 1 :])

    def _spans_of_row(self, row: int, rank: int) -> Iterator[SliceSpan]:
        """The spans of one row: all elements with equal indices before `dim`."""
        full, local = row * self.shape[self.dim] * self._inner, row * self.local_shape[self.dim] * self._inner
        for part, (size, own) in enumerate(zip(self.parts, self.local_parts, strict=True)):
            valid = self.valid(rank, part)
            if valid:
                yield SliceSpan(rank, full + rank * own * self._inner, local, valid * self._inner)
            full, local = full + size * self._inner, local + own * self._inner


@dataclass(frozen=True)
class TensorSlices:
    """What one rank of a tensor-parallel group holds of a model's parameters.

    splits: by the name of the parameter; all others are replicated. summed: replicated parameters that are used by
    divided computations, so that their gradients are summed over the group.
    """

    rank: int = 0
    degree: int = 1
    splits: Mapping[str, Split] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()

    def local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this rank's tensor of a parameter of this full shape."""
        split = self.splits.get(name)
        return tuple(shape) if split is None else split.local_shape

    def counts_here(self, name: str) -> bool:
        """Whether a sum over all ranks takes this rank's elements: of replicas, only those of the first rank count."""
        return self.rank == 0 or name in self.splits

    def spans(self, name: str, start: int, stop: int) -> Iterator[SliceSpan]:
        """Where elements [start, stop) of this rank's flattened tensor are in the full parameter; without padding."""
        split = self.splits.get(name)
        if split is None:
            return iter((SliceSpan(self.rank, start, start, stop - start),))
        return split.spans_of_slice(self.rank, start, stop)


NOT_SPLIT = TensorSlices()
