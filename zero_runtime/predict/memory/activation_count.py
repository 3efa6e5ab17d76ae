"""Bytes of activations, from a trace of the storages that one step created and freed. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one micro-batch on a rank's device, without model states, gradients of parameters and its inputs.

    kept: held from forward to backward; `kept_outside` is the part created outside the repeated blocks (embedding,
    head, logits, loss). peak: held at the worst moment of forward and backward; `peak_outside` is the part created by
    the forward outside the blocks, `peak_backward` the part created by the backward, recomputation included. host: held
    in host memory from forward to backward.
    """

    kept: int
    kept_outside: int
    peak: int
    peak_outside: int
    peak_backward: int
    host: int = 0


class Mark(IntEnum):
    """What the hooks report to the schedule about a unit (module_hooks.py), and the first gradient of a unit."""

    BEFORE_FORWARD = 0
    AFTER_FORWARD = 1
    BEFORE_BACKWARD = 2
    GRADIENT = 3
    AFTER_BACKWARD = 4


@dataclass
class Trace:
    """Storages in the order in which a step created them: their bytes, and whether the forward of a block created them.

    events: number + 1 when that storage was created, -(number + 1) when it was freed. forward_end: number of events
    before the backward. marks: the number of events before it, a Mark, and the unit by its position.
    random_state_bytes: kept from forward to backward by recomputing blocks, outside of all operations.
    """

    sizes: list[int] = field(default_factory=list)
    in_blocks: list[bool] = field(default_factory=list)
    on_host: list[bool] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, Mark, int]] = field(default_factory=list)
    forward_end: int = 0
    random_state_bytes: int = 0

    def mark(self, kind: Mark, unit: int) -> None:
        """Record a mark. (A recomputation reports each read of a parameter; repeated reports are left out.)"""
        if not self.marks or self.marks[-1][1:] != (kind, unit):
            self.marks.append((len(self.events), kind, unit))

    def came(self, nbytes: int, *, in_block: bool, on_host: bool = False) -> int:
        """Record a new storage and return its number."""
        self.sizes.append(nbytes)
        self.in_blocks.append(in_block)
        self.on_host.append(on_host)
        self.events.append(len(self.sizes))
        return len(self.sizes) - 1

    def went(self, number: int) -> None:
        self.events.append(-(number + 1))

    def order_ends(self) -> None:
        """Order storages that end together by their numbers: torch.autocast drops its copies of weights in the order of
        their addresses, which is another one in each trace."""
        bounds = {0, len(self.events), self.forward_end, *(count for count, _, _ in self.marks)}
        bounds |= {place for place in range(1, len(self.events)) if max(self.events[place - 1 : place + 1]) > 0}
        places = sorted(bounds)
        for start, end in pairwise(places):
            self.events[start:end] = sorted(self.events[start:end], reverse=True)

    def same_steps(self, other: Trace) -> bool:
        """Whether both traces create and free storages in the same order, whatever the sizes."""
        mine = (self.events, self.in_blocks, self.on_host, self.marks, self.forward_end, self.random_state_bytes)
        theirs = (
            other.events,
            other.in_blocks,
            other.on_host,
            other.marks,
            other.forward_end,
            other.random_state_bytes,
        )
        return mine == theirs

    def total(self) -> ActivationBytes:
        kept = self._alive(self.forward_end)
        outside = [one for one in kept if not self.in_blocks[one]]
        running = list(accumulate(self.changes()))
        worst = max(range(len(running)), key=running.__getitem__, default=-1)
        blocks, peak_outside, peak_backward = self.parts(worst + 1)
        return ActivationBytes(
            kept=self._bytes(kept) + self.random_state_bytes,
            kept_outside=self._bytes(outside),
            peak=blocks + peak_outside + peak_backward,
            peak_outside=peak_outside,
            peak_backward=peak_backward,
            host=sum(self.sizes[one] for one in kept if self.on_host[one]),
        )

    def parts(self, count: int) -> tuple[int, int, int]:
        """Bytes on the device after the first `count` events: created by the forward in blocks and outside of them, and
        by the backward."""
        blocks, outside, backward = self.running_parts()
        return blocks[count], outside[count], backward[count]

    def running_parts(self, sizes: Sequence[int] | None = None) -> tuple[list[int], list[int], list[int]]:
        """The three numbers of `parts` for each count from 0 to all events, with other sizes of the storages if
        given."""
        by_forward = max(self.events[: self.forward_end], default=0)
        kinds = [0 if in_block else 1 for in_block in self.in_blocks[:by_forward]]
        kinds += [2] * (len(self.in_blocks) - by_forward)
        changes = [
            (kinds[abs(event) - 1], change) for event, change in zip(self.events, self.changes(sizes), strict=True)
        ]

        def running(part: int) -> list[int]:
            return list(accumulate((change if kind == part else 0 for kind, change in changes), initial=0))

        return running(0), running(1), running(2)

    def changes(self, sizes: Sequence[int] | None = None) -> list[int]:
        """The bytes on the device by which each event changes them, with other sizes of the storages if given."""
        pairs = zip(self.sizes if sizes is None else sizes, self.on_host, strict=True)
        device = [0 if is_on_host else size for size, is_on_host in pairs]
        return [device[event - 1] if event > 0 else -device[-event - 1] for event in self.events]

    def _alive(self, count: int) -> list[int]:
        """Numbers of the storages that exist after the first `count` events."""
        events = self.events[:count]
        freed = {-event for event in events if event < 0}
        return [event - 1 for event in events if event > 0 and event not in freed]

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.sizes[one] for one in numbers if not self.on_host[one])


Line = tuple[int, int]  # bytes at the lowest micro-batch, and bytes for each sequence more


@dataclass(frozen=True)
class LinearTrace:
    """The traces of all micro-batches from `low` to `high`.

    trace: of the micro-batch `low`. slopes: bytes by which each storage grows with the micro-batch.
    """

    trace: Trace
    slopes: list[int]
    low: int
    high: int

    @classmethod
    def of_one(cls, micro: int, trace: Trace) -> LinearTrace:
        return cls(trace, [0] * len(trace.sizes), micro, micro)

    @classmethod
    def between(cls, first: tuple[int, Trace], second: tuple[int, Trace]) -> LinearTrace | None:
        """From the traces of two micro-batches; None if they do not determine those between them.

        Each storage's size is an integer plus another integer times the micro-batch, as shapes are; two traces
        determine both integers. If the two steps create and free the same storages in the same order, so does the step
        between them: behaviour that depends on the batch size (one more tile, another kernel) changes at some size and
        not back again.
        """
        (low, small), (high, large) = first, second
        if not low < high or not small.same_steps(large):
            return None
        grown = [divmod(b - a, high - low) for a, b in zip(small.sizes, large.sizes, strict=True)]
        if any(rest for _, rest in grown):
            return None
        return cls(small, [slope for slope, _ in grown], low, high)

    def plain(self) -> dict[str, Any]:
        """As plain data for JSON; `of_plain` is the inverse."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**named, "trace": vars(self.trace)}

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> LinearTrace:
        trace = Trace(**data["trace"])
        trace.marks = [(position, Mark(kind), unit) for position, kind, unit in trace.marks]
        return cls(**{**data, "trace": trace})

    @cached_property
    def segments(self) -> list[list[tuple[int, Line]]]:
        """For the events after each mark, those moments that may have the most bytes at some micro-batch, as numbers of
        events and lines: the first moment, and the upper hull of all. The start of the trace comes before the first
        mark, and its end after the last.
        """
        trace = self.trace
        bases, slopes = (accumulate(trace.changes(sizes), initial=0) for sizes in (None, self.slopes))
        levels = list(enumerate(zip(bases, slopes, strict=True)))
        end = len(trace.events)
        bounds = [0, *(position for position, _, _ in trace.marks), end, end]
        return [_hull(levels[start : stop + 1]) for start, stop in pairwise(bounds)]

    def parts(self, count: int) -> tuple[Line, Line, Line]:
        """The three numbers of `Trace.parts` at each micro-batch, as lines."""
        bases, slopes = self._running_parts
        lines = [(base[count], slope[count]) for base, slope in zip(bases, slopes, strict=True)]
        return lines[0], lines[1], lines[2]

    @cached_property
    def _running_parts(self) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """Of the trace and of the slopes: which storages exist does not depend on their sizes."""
        return self.trace.running_parts(), self.trace.running_parts(self.slopes)

    def at(self, micro: int) -> Trace:
        """The trace of one micro-batch from low to high."""
        if not self.low <= micro <= self.high:
            raise ValueError(f"micro-batch {micro}: expected {self.low} to {self.high}")
        more = micro - self.low
        sizes = [size + more * slope for size, slope in zip(self.trace.sizes, self.slopes, strict=True)]
        return replace(self.trace, sizes=sizes)


def _hull(found: list[tuple[int, Line]]) -> list[tuple[int, Line]]:
    """The first moment, and those that no other exceeds in both bytes and slope."""
    kept: list[tuple[int, Line]] = []
    for position, line in sorted(found, key=lambda one: (-one[1][0], -one[1][1])):
        if not kept or line[1] > kept[-1][1][1]:
            kept.append((position, line))
    first = found[0]
    return [first, *(one for one in kept if one[0] != first[0])]
