"""The layout of a unit's flat tensor: the place of each parameter and the range of each shard.

Offsets and ranges count elements. Integer arithmetic only; standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from zero_runtime.precision import CODED_NUMEL

# A shard's size is a multiple of this, so that every shard starts at a 64-byte boundary in dtypes of 16 bits or more.
SHARD_ALIGNMENT_NUMEL = 32
READ_NUMEL = 4 << 20  # elements read from a source at a time: bounds the memory needed in addition to the shards


class Flat(Protocol):
    """A flat tensor, or anything else that a slice of elements can be taken from."""

    def __getitem__(self, elements: slice, /) -> Flat: ...


F = TypeVar("F", bound=Flat)


@dataclass(frozen=True)
class Segment:
    """The place of one parameter in the flat tensor: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    def of(self, flat: F) -> F:
        """The parameter's elements, [numel], of the flat tensor [P]; a view."""
        return flat[self.offset : self.offset + self.numel]  # type: ignore[return-value]  # a slice has the same type


@dataclass(frozen=True)
class Piece:
    """The part of one parameter in one shard: elements [start, stop) of the parameter, at shard_offset of the shard."""

    name: str
    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, shard: F) -> F:
        """The piece's elements, [numel], of a shard [S]; a view."""
        return shard[self.shard_offset : self.shard_offset + self.numel]  # type: ignore[return-value]  # the same type


@dataclass(frozen=True)
class FlatLayout:
    """Segments in order, then padding up to P = padded_numel elements, in shard_count equal shards of S elements.

    With `block_numel` above 1 there is also padding between the segments, see `build`. numel: elements without padding.
    """

    segments: tuple[Segment, ...]
    numel: int
    padded_numel: int
    shard_count: int

    @classmethod
    def build(
        cls, shapes: Iterable[tuple[str, tuple[int, ...]]], *, shard_count: int, world: int, block_numel: int = 1
    ) -> FlatLayout:
        """Lay out parameters, given as pairs of name and shape, in order.

        P is a multiple of world * SHARD_ALIGNMENT_NUMEL and not only of the shard count: an all-reduce over the
        replicas splits each shard again, and with equal pieces the counted bytes are integers. P is never zero, so that
        a unit of empty parameters has something to gather.

        Every parameter and every shard begins at a multiple of `block_numel`. A block of `block_numel` elements then
        holds the same elements of one parameter for any world size, plan and unit size.
        """
        segments = []
        offset = numel = 0
        for name, shape in shapes:
            segments.append(Segment(name, tuple(shape), offset, math.prod(shape)))
            numel += math.prod(shape)
            offset += -(-math.prod(shape) // block_numel) * block_numel
        multiple = world * math.lcm(SHARD_ALIGNMENT_NUMEL, block_numel)
        return cls(tuple(segments), numel, max(-(-offset // multiple), 1) * multiple, shard_count)

    @cached_property
    def shard_numel(self) -> int:
        """S, the number of elements of one shard."""
        return self.padded_numel // self.shard_count

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding as ranges [start, stop) of the flat tensor, in order."""
        ends = [0, *(segment.offset + segment.numel for segment in self.segments)]
        starts = [*(segment.offset for segment in self.segments), self.padded_numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def shard_range(self, shard: int) -> tuple[int, int]:
        """[start, stop) of one shard in the flat tensor."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def shard_of(self, flat: F, shard: int) -> F:
        """The elements [S] of one shard of the flat tensor [P]; a view."""
        start, stop = self.shard_range(shard)
        return flat[start:stop]  # type: ignore[return-value]  # a slice has the same type

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """The parts of parameters in the shard, in order; padding is in no piece."""
        low, high = self.shard_range(shard)
        found = []
        for segment in self.segments:
            start = max(segment.offset, low)
            stop = min(segment.offset + segment.numel, high)
            if start < stop:
                found.append(Piece(segment.name, start - segment.offset, stop - segment.offset, start - low))
        return tuple(found)


@dataclass(frozen=True)
class LayoutRules:
    """What decides the layouts of a run's units, besides their parameters. The runtime and the predictions both lay
    units out by it.

    world: the ranks of the data axis. state_block_numel: elements of a block of the optimizer's states. aligned_numel:
    elements at whose multiples parameters begin, whatever their states (`Wire.aligned_numel`).
    """

    shard_count: int
    world: int
    state_block_numel: int = 1
    aligned_numel: int = 1

    def layout(
        self, shapes: Iterable[tuple[str, tuple[int, ...]]], *, trainable: bool, coded: bool = False
    ) -> FlatLayout:
        """The layout of a unit: blocks of codes of its states, messages and weights (`coded`) stay in one shard."""
        blocks = math.lcm(self.state_block_numel if trainable else 1, self.aligned_numel, CODED_NUMEL if coded else 1)
        return FlatLayout.build(shapes, shard_count=self.shard_count, world=self.world, block_numel=blocks)
