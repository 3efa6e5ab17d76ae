"""Which elements of a parameter each rank of a tensor-parallel group holds.

[Note: slices]
A split parameter is divided along one dimension. If it holds several matrices one after another along that dimension
(`parts`, as a fused query, key and value), each of them is divided, and a rank holds its slice of each. All ranks hold
slices of one shape: where `degree` does not divide a vocabulary, the last ranks hold rows of padding, which are zero,
have no gradient, and belong to no element of the full parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from zero_runtime.flat_layout import Piece, Segment
from zero_runtime.slices import Slices, SliceSpan


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

    def cut(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """This rank's slice of a full tensor, of `local_shape`; a copy that the caller owns. Padding is zero."""
        found = full.new_zeros(self.local_shape)
        start = local = 0
        for part, (size, own) in enumerate(zip(self.parts, self.local_parts, strict=True)):
            valid = self.valid(rank, part)
            source = full.narrow(self.dim, start + min(rank * own, size), valid)
            found.narrow(self.dim, local, valid).copy_(source)
            start, local = start + size, local + own
        return found

    def join(self, slices: torch.Tensor) -> torch.Tensor:
        """The full tensor, of `shape`, from the flattened slices of all ranks, [degree, local_numel]; a copy."""
        full = slices.new_empty(self.shape)
        for rank, flat in enumerate(slices):
            own_slice = flat.view(self.local_shape)
            start = local = 0
            for part, (size, own) in enumerate(zip(self.parts, self.local_parts, strict=True)):
                valid = self.valid(rank, part)
                target = full.narrow(self.dim, start + min(rank * own, size), valid)
                target.copy_(own_slice.narrow(self.dim, local, valid))
                start, local = start + size, local + own
        return full

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
class TensorSlices(Slices):
    """What one rank of a tensor-parallel group holds: slices of the parameters in `splits`, and all of the others."""

    splits: Mapping[str, Split] = field(default_factory=dict)

    def local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        split = self.splits.get(name)
        return tuple(shape) if split is None else split.local_shape

    def counts_here(self, name: str) -> bool:
        return self.rank == 0 or name in self.splits

    def counted(self, pieces: Sequence[Piece], low: int, high: int) -> list[tuple[int, int]]:
        if self.rank == 0:
            return [(low, high)]
        ranges: list[tuple[int, int]] = []
        for piece in pieces:
            start, stop = max(piece.shard_offset, low), min(piece.shard_offset + piece.numel, high)
            if start >= stop or not self.counts_here(piece.name):
                continue
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        return ranges

    def spans(self, name: str, start: int, stop: int) -> Iterator[SliceSpan]:
        split = self.splits.get(name)
        return super().spans(name, start, stop) if split is None else split.spans_of_slice(self.rank, start, stop)

    def cut(self, name: str, full: torch.Tensor) -> torch.Tensor:
        split = self.splits.get(name)
        return full if split is None else split.cut(full, self.rank)

    def join(self, segment: Segment, own: torch.Tensor) -> torch.Tensor:
        split = self.splits.get(segment.name)
        return super().join(segment, own) if split is None else split.join(self.axis.gather(own, counted=False))
