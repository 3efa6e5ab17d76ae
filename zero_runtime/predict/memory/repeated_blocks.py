"""The trace of a model of many equal blocks, from the trace of the same model with five of them.

[Note: copies of the middle block]
Blocks 0 to 4 of the short model stand for the first two, any one in between, and the last two of the long one. The
events of block 2 in the forward and in the backward are repeated for each block in between. They create storages of
their own, and may free those of their own block and of the neighbours on both sides; that a neighbour's storage is
meant follows from its place among those that the neighbour created. If an event of block 2 frees anything else, or if
the three middle blocks do not create the same storages, the blocks are not equal in memory, and the long model has to
be traced itself. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace

SHORT = 5  # blocks of the short model
MIDDLE = 2


@dataclass(frozen=True)
class BlockUnits:
    """Where the units of the blocks are among all units: `count` for each block, one block after the other."""

    first: int
    count: int

    def block(self, unit: int) -> int | None:
        """The block of a unit of the short model; None for a unit outside of the blocks."""
        block = (unit - self.first) // self.count
        return block if 0 <= block < SHORT else None


Span = tuple[int, int]  # events [start, stop)


def linear_with_blocks(short: LinearTrace, units: BlockUnits, blocks: int) -> LinearTrace | None:
    """The trace of the model with `blocks` equal blocks; None if that of five does not determine it."""
    if blocks <= SHORT:
        return None
    trace = short.trace
    spans = _spans(trace, units)
    if spans is None or not (_alike(trace, spans) and _alike(replace(trace, sizes=short.slopes), spans)):
        return None
    copying = _Copying(trace, units, spans, blocks - SHORT + 1)
    long = copying.copied()
    return None if long is None else replace(short, trace=long, slopes=[short.slopes[one] for one in copying.origins])


def _spans(trace: Trace, units: BlockUnits) -> dict[tuple[bool, int], Span] | None:
    """The events of blocks 1 to 3, in forward (True) and backward; None if the blocks do not come one by one."""
    starts: dict[tuple[bool, int], int] = {}
    for position, kind, unit in trace.marks:
        block = units.block(unit)
        if block is not None and kind in (Mark.BEFORE_FORWARD, Mark.BEFORE_BACKWARD):
            starts.setdefault((kind == Mark.BEFORE_FORWARD, block), position)
    if len(starts) != 2 * SHORT:
        return None
    spans = {(True, block): (starts[True, block], starts[True, block + 1]) for block in (1, 2, 3)}
    spans |= {(False, block): (starts[False, block], starts[False, block - 1]) for block in (1, 2, 3)}
    in_order = all(start < stop for start, stop in spans.values())
    return spans if in_order and spans[True, 3][1] <= trace.forward_end <= spans[False, 3][0] else None


def _created(trace: Trace, span: Span) -> list[int]:
    """The numbers of the storages that the events create, in order."""
    return [event - 1 for event in trace.events[slice(*span)] if event > 0]


def _alike(trace: Trace, spans: dict[tuple[bool, int], Span]) -> bool:
    """Whether the middle blocks create the same storages."""

    def made(key: tuple[bool, int]) -> list[tuple[int, bool, bool]]:
        return [(trace.sizes[one], trace.in_blocks[one], trace.on_host[one]) for one in _created(trace, spans[key])]

    return all(made((way, 1)) == made((way, 2)) == made((way, 3)) for way in (True, False))


class _Copying:
    """Writes the long trace: the short one with `copies` of block 2 instead of one. origins: the number in the short
    trace of each storage of the long one."""

    def __init__(self, short: Trace, units: BlockUnits, spans: dict[tuple[bool, int], Span], copies: int) -> None:
        self._short, self._units, self._spans, self._copies = short, units, spans, copies
        self._long = Trace()
        self.origins: list[int] = []
        self._numbers: dict[tuple[int, int], int] = {}  # of the long trace, by copy and number in the short one
        # By storage of blocks 1 and 3: the storage of block 2 in the same place.
        self._like: dict[int, tuple[int, int]] = {}
        for way in (True, False):
            own = _created(short, spans[way, MIDDLE])
            for neighbour, shift in ((1, -1), (3, 1)):
                others = _created(short, spans[way, neighbour])
                self._like |= {other: (mine, shift) for other, mine in zip(others, own, strict=True)}
        self._own = {one for way in (True, False) for one in _created(short, spans[way, MIDDLE])}

    def copied(self) -> Trace | None:
        forward, backward = self._spans[True, MIDDLE], self._spans[False, MIDDLE]
        last, everything = self._copies - 1, len(self._short.events)
        parts: list[tuple[Span, int]] = [((0, forward[0]), 0)]
        parts += [(forward, copy) for copy in range(self._copies)]
        parts += [((forward[1], backward[0]), last)]
        parts += [(backward, copy) for copy in reversed(range(self._copies))]
        parts += [((backward[1], everything), 0)]
        for span, copy in parts:
            if not self._write(span, copy, is_copy=span in (forward, backward)):
                return None
        self._long.random_state_bytes = self._short.random_state_bytes // SHORT * (self._copies + SHORT - 1)
        return None if self._numbers else self._long  # a trace frees all that it creates

    def _write(self, span: Span, copy: int, *, is_copy: bool) -> bool:
        """Write events and their marks. copy: of block 2, which they are or are next to. False if they cannot be."""
        marks = [mark for mark in self._short.marks if span[0] <= mark[0] < span[1]]
        if span[1] == len(self._short.events):
            marks += [mark for mark in self._short.marks if mark[0] == span[1]]
        for position in range(*span):
            while marks and marks[0][0] == position:
                self._mark(*marks.pop(0)[1:], copy, is_copy=is_copy)
            if position == self._short.forward_end:
                self._long.forward_end = len(self._long.events)
            event = self._short.events[position]
            if event > 0:
                self._create(event - 1, copy)
            elif not self._free(-event - 1, copy, is_copy=is_copy):
                return False
        for _, kind, unit in marks:
            self._mark(kind, unit, copy, is_copy=is_copy)
        return True

    def _create(self, number: int, copy: int) -> None:
        short = self._short
        key = (copy if number in self._own else 0, number)
        self.origins.append(number)
        self._numbers[key] = self._long.came(
            short.sizes[number], in_block=short.in_blocks[number], on_host=short.on_host[number]
        )

    def _free(self, number: int, copy: int, *, is_copy: bool) -> bool:
        if number in self._own:
            key = (copy, number)
        elif is_copy and number in self._like:
            mine, shift = self._like[number]
            # Next to the first and the last copy are blocks 1 and 3 themselves.
            key = (copy + shift, mine) if 0 <= copy + shift < self._copies else (0, number)
        elif is_copy:
            return False
        else:
            key = (0, number)
        found = self._numbers.pop(key, None)
        if found is None:
            return False
        self._long.went(found)
        return True

    def _mark(self, kind: Mark, unit: int, copy: int, *, is_copy: bool) -> None:
        units, block = self._units, self._units.block(unit)
        if block == MIDDLE or (is_copy and block is not None):  # the neighbours of a copy are shifted with it
            unit += copy * units.count
        elif unit >= units.first + MIDDLE * units.count:
            unit += (self._copies - 1) * units.count
        self._long.mark(kind, unit)


def equal_units(of_blocks: Sequence[int | None]) -> BlockUnits | None:
    """Where the units of the short model's blocks are; None if they are not as many in each, block after block.

    of_blocks: the block of each unit, in the units' order.
    """
    places = [place for place, block in enumerate(of_blocks) if block is not None]
    count, rest = divmod(len(places), SHORT)
    if not places or rest or places != list(range(places[0], places[-1] + 1)):
        return None
    in_order = [of_blocks[place] for place in places] == [block for block in range(SHORT) for _ in range(count)]
    return BlockUnits(places[0], count) if in_order else None
