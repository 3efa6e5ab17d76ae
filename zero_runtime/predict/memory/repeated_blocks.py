"""The trace of a model whose blocks repeat, from the trace of the same model with few of them.

[Note: copies of the middle blocks]
Blocks repeat with a period: 1 if all are equal, 6 if five blocks with a sliding window follow each other before one
without. The short model has the first two blocks, one period of those in between (the middle), and the rest, at least
two. The events of the middle in the forward and in the backward are repeated for each period that the short model
lacks. They create storages of their own, and may free those of the middle and of its neighbours on both sides; that a
neighbour's storage is meant follows from its place among those that the neighbour created. The neighbour before is
like the last block of the middle, and the one behind like the first. What was created outside of all blocks, such as a
table that the blocks without a window read, is freed by the copy that comes last. What all blocks leave behind for one
sum, as a decoder's blocks do for the gradient of the encoder's output, is freed there in the order of the blocks. If an
event of the middle frees anything else, or if these blocks do not create the same storages, the blocks are not equal in
memory, and the long model has to be traced itself. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace

EDGE = 2  # blocks of the short model before the middle, and the fewest behind it


@dataclass(frozen=True)
class ShortLayout:
    """The blocks of a short model: `blocks` of them, of which those from EDGE on are repeated, `period` together."""

    blocks: int = 2 * EDGE + 1
    period: int = 1

    @property
    def behind(self) -> int:
        """The first block behind the middle."""
        return EDGE + self.period

    def copies(self, blocks: int) -> int:
        """How often the middle is in a model with so many blocks."""
        return (blocks - self.blocks) // self.period + 1

    def kept(self, blocks: int) -> list[int]:
        """The blocks of the long model that the short one has."""
        return [*range(self.behind), *range(blocks - self.blocks + self.behind, blocks)]


@dataclass(frozen=True)
class BlockUnits:
    """Where the units of the blocks are among all units: `count` for each block, one block after the other."""

    first: int
    count: int
    layout: ShortLayout = ShortLayout()

    def block(self, unit: int) -> int | None:
        """The block of a unit of the short model; None for a unit outside of the blocks."""
        block = (unit - self.first) // self.count
        return block if 0 <= block < self.layout.blocks else None

    def is_middle(self, unit: int) -> bool:
        block = self.block(unit)
        return block is not None and EDGE <= block < self.layout.behind

    def is_behind(self, unit: int) -> bool:
        return unit >= self.first + self.layout.behind * self.count

    @property
    def of_middle(self) -> int:
        """The number of units by which a copy of the middle shifts those behind it."""
        return self.layout.period * self.count


Span = tuple[int, int]  # events [start, stop)


def linear_with_blocks(short: LinearTrace, units: BlockUnits, blocks: int, others: int = 0) -> LinearTrace | None:
    """The trace of the model with `blocks` blocks; None if that of the short one does not determine it.

    others: blocks of the model in other lists.
    """
    if blocks <= units.layout.blocks:
        return None
    trace = short.trace
    spans = _spans(trace, units)
    if spans is None or not (_alike(trace, spans) and _alike(replace(trace, sizes=short.slopes), spans)):
        return None
    copying = _Copying(trace, units, spans, blocks)
    long = copying.copied()
    if long is not None:  # a state is kept for each block that is computed again
        of_block = trace.random_state_bytes // (units.layout.blocks + others)
        long.random_state_bytes = of_block * (blocks + others)
    return None if long is None else replace(short, trace=long, slopes=[short.slopes[one] for one in copying.origins])


class _Part(Enum):
    """What is repeated; the block before it and the one behind it; and the blocks of the middle that these are like."""

    MIDDLE = "middle"
    BEFORE = "before"
    BEHIND = "behind"
    FIRST = "first of the middle"
    LAST = "last of the middle"


LIKE = {_Part.BEFORE: _Part.LAST, _Part.BEHIND: _Part.FIRST}
Spans = dict[tuple[bool, _Part], Span]  # in forward (True) and backward


def _spans(trace: Trace, units: BlockUnits) -> Spans | None:
    """The events of the middle and the blocks at its ends; None if the blocks do not come one by one."""
    starts: dict[tuple[bool, int], int] = {}
    for position, kind, unit in trace.marks:
        block = units.block(unit)
        if block is not None and kind in (Mark.BEFORE_FORWARD, Mark.BEFORE_BACKWARD):
            starts.setdefault((kind == Mark.BEFORE_FORWARD, block), position)
    if len(starts) != 2 * units.layout.blocks:
        return None
    behind = units.layout.behind
    blocks = {
        _Part.MIDDLE: (EDGE, behind - 1),
        _Part.BEFORE: (EDGE - 1, EDGE - 1),
        _Part.BEHIND: (behind, behind),
        _Part.FIRST: (EDGE, EDGE),
        _Part.LAST: (behind - 1, behind - 1),
    }
    spans = {(True, part): (starts[True, low], starts[True, high + 1]) for part, (low, high) in blocks.items()}
    spans |= {(False, part): (starts[False, high], starts[False, low - 1]) for part, (low, high) in blocks.items()}
    in_order = all(start < stop for start, stop in spans.values())
    ends = spans[True, _Part.BEHIND][1] <= trace.forward_end <= spans[False, _Part.BEHIND][0]
    return spans if in_order and ends else None


def _created(trace: Trace, span: Span) -> list[int]:
    """The numbers of the storages that the events create, in order."""
    return [event - 1 for event in trace.events[slice(*span)] if event > 0]


def _alike(trace: Trace, spans: Spans) -> bool:
    """Whether the blocks beside the middle create the same storages as those that they are like."""

    def made(key: tuple[bool, _Part]) -> list[tuple[int, bool, bool]]:
        return [(trace.sizes[one], trace.in_blocks[one], trace.on_host[one]) for one in _created(trace, spans[key])]

    return all(made((way, one)) == made((way, other)) for way in (True, False) for one, other in LIKE.items())


class _Copying:
    """Writes the trace of `blocks` blocks: the short one with copies of the middle. origins: the number in the short
    trace of each storage of the long one."""

    def __init__(self, short: Trace, units: BlockUnits, spans: Spans, blocks: int) -> None:
        self._short, self._units, self._spans = short, units, spans
        self._copies = units.layout.copies(blocks)
        self._long = Trace()
        self.origins: list[int] = []
        self._numbers: dict[tuple[int, int], int] = {}  # of the long trace, by copy and number in the short one
        # By storage of the blocks beside the middle: the storage of the middle in the same place, and of which copy.
        self._like: dict[int, tuple[int, int]] = {}
        for way in (True, False):
            for neighbour, shift in ((_Part.BEFORE, -1), (_Part.BEHIND, 1)):
                own = _created(short, spans[way, LIKE[neighbour]])
                others = _created(short, spans[way, neighbour])
                self._like |= {other: (mine, shift) for other, mine in zip(others, own, strict=True)}
        self._own = {one for way in (True, False) for one in _created(short, spans[way, _Part.MIDDLE])}

    def copied(self) -> Trace | None:
        forward, backward = self._spans[True, _Part.MIDDLE], self._spans[False, _Part.MIDDLE]
        last, everything = self._copies - 1, len(self._short.events)
        parts: list[tuple[Span, int]] = [((0, forward[0]), 0)]
        parts += [(forward, copy) for copy in range(self._copies)]
        parts += [((forward[1], backward[0]), last)]
        parts += [(backward, copy) for copy in reversed(range(self._copies))]
        parts += [((backward[1], everything), 0)]
        for span, copy in parts:
            if not self._write(span, copy, is_copy=span in (forward, backward)):
                return None
        return None if self._numbers else self._long  # a trace frees all that it creates

    def _write(self, span: Span, copy: int, *, is_copy: bool) -> bool:
        """Write events and their marks. copy: of the middle, which they are or are next to. False if they cannot be."""
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
            elif self._is_left(-event - 1, position, is_copy=is_copy):
                for one in range(self._copies):
                    self._long.went(self._numbers.pop((one, -event - 1)))
            elif not self._free(-event - 1, copy, span, is_copy=is_copy):
                return False
        for _, kind, unit in marks:
            self._mark(kind, unit, copy, is_copy=is_copy)
        return True

    def _is_left(self, number: int, position: int, *, is_copy: bool) -> bool:
        """Whether the storages of all copies are freed here, behind the blocks, between those of the neighbours."""
        if is_copy or any((one, number) not in self._numbers for one in range(self._copies)):
            return False
        beside = [self._like.get(-self._short.events[place] - 1) for place in (position - 1, position + 1)]
        return beside == [(number, -1), (number, 1)]

    def _create(self, number: int, copy: int) -> None:
        short = self._short
        key = (copy if number in self._own else 0, number)
        self.origins.append(number)
        self._numbers[key] = self._long.came(
            short.sizes[number], in_block=short.in_blocks[number], on_host=short.on_host[number]
        )

    def _free(self, number: int, copy: int, span: Span, *, is_copy: bool) -> bool:
        if number in self._own:
            key = (copy, number)
        elif is_copy and number in self._like:
            mine, shift = self._like[number]
            # Next to the first and the last copy are the blocks of the short model themselves.
            key = (copy + shift, mine) if 0 <= copy + shift < self._copies else (0, number)
        elif is_copy and self._short.in_blocks[number]:
            return False
        elif is_copy and copy != (self._copies - 1 if span == self._spans[True, _Part.MIDDLE] else 0):
            return True  # other copies still use it
        else:
            key = (0, number)
        found = self._numbers.pop(key, None)
        if found is None:
            return False
        self._long.went(found)
        return True

    def _mark(self, kind: Mark, unit: int, copy: int, *, is_copy: bool) -> None:
        units, copies = self._units, [copy]
        if units.is_middle(unit) and not is_copy and kind == Mark.BEFORE_BACKWARD:
            copies = list(range(self._copies))  # an output that passed through all blocks reports to each of them
        for one in copies:
            if units.is_middle(unit) or (is_copy and units.block(unit) is not None):  # neighbours move with a copy
                moved = one * units.of_middle
            else:
                moved = (self._copies - 1) * units.of_middle if units.is_behind(unit) else 0
            self._long.mark(kind, unit + moved)


def equal_units(of_blocks: Sequence[int | None], layout: ShortLayout = ShortLayout()) -> BlockUnits | None:
    """Where the units of the short model's blocks are; None if they are not as many in each, block after block.

    of_blocks: the block of each unit, in the units' order.
    """
    places = [place for place, block in enumerate(of_blocks) if block is not None]
    count, rest = divmod(len(places), layout.blocks)
    if not places or rest or places != list(range(places[0], places[-1] + 1)):
        return None
    in_order = [of_blocks[place] for place in places] == [block for block in range(layout.blocks) for _ in range(count)]
    return BlockUnits(places[0], count, layout) if in_order else None
