"""The model's own work in a step, divided at the moments at which the runtime acts. Standard library only.

[Note: segments]
The hooks report a mark to the schedule whenever a unit is about to be used or has been used (`Mark`). A segment is what
the model computes between two marks. Which marks come in which order is known from the trace of a step on fake tensors;
how long a segment takes is measured on a model of few blocks, of which those in the middle stand for all like them
(repeated_blocks.py), or computed from counted operations. Both are looked up by the mark that ends the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zero_runtime.predict.memory.activation_count import Mark
from zero_runtime.predict.memory.repeated_blocks import BlockUnits

Value = TypeVar("Value")
Other = TypeVar("Other")
Key = tuple[Mark, int]  # a mark and the position of its unit
END = (Mark.AFTER_BACKWARD, -1)  # the end of the backward, which has no mark


@dataclass(frozen=True)
class SegmentTable(Generic[Value]):
    """A value for each segment of a micro-batch, by the mark that ends it; for a mark that comes several times, in that
    order."""

    values: Mapping[Key, Sequence[Value]]

    @classmethod
    def of(cls, marks: Iterable[Key], values: Iterable[Value]) -> SegmentTable[Value]:
        """From the marks in order, and a value for each of them and for the rest of the backward."""
        found: dict[Key, list[Value]] = {}
        for key, value in zip([*marks, END], values, strict=True):
            found.setdefault(key, []).append(value)
        return cls(found)

    def in_order(self, marks: Sequence[Key]) -> list[Value] | None:
        """The value of each segment of a step with these marks; None if it has other marks than those of this table."""
        seen: dict[Key, int] = {}
        found = []
        for key in [*marks, END]:
            place = seen.get(key, 0)
            seen[key] = place + 1
            of_key = self.values.get(key, ())
            if place >= len(of_key):
                return None
            found.append(of_key[place])
        return found

    def with_blocks(self, units: BlockUnits, blocks: int) -> SegmentTable[Value]:
        """The table of a model with `blocks` blocks, from that of the short one: see repeated_blocks.py."""
        copies = units.layout.copies(blocks)
        found: dict[Key, Sequence[Value]] = {}
        for (kind, unit), values in self.values.items():
            if units.is_middle(unit):
                for copy in range(copies):
                    found[kind, unit + copy * units.of_middle] = values
            else:
                found[kind, unit + units.is_behind(unit) * (copies - 1) * units.of_middle] = values
        return SegmentTable(found)

    def map(self, change: Callable[[Value], Other]) -> SegmentTable[Other]:
        """The same table with other values."""
        return SegmentTable({key: [change(value) for value in values] for key, values in self.values.items()})

    def combined(
        self, other: SegmentTable[Value], combine: Callable[[Value, Value], Value]
    ) -> SegmentTable[Value] | None:
        """A table of each two values of a segment combined; None if the tables have different segments."""
        pairs = {key: (values, other.values.get(key, ())) for key, values in self.values.items()}
        if len(other.values) != len(pairs) or any(len(mine) != len(theirs) for mine, theirs in pairs.values()):
            return None
        return SegmentTable({key: [*map(combine, mine, theirs)] for key, (mine, theirs) in pairs.items()})

    def plain(self) -> list[list[Any]]:
        """As plain data for JSON; `of_plain` is the inverse."""
        return [[int(kind), unit, list(values)] for (kind, unit), values in self.values.items()]

    @classmethod
    def of_plain(cls, data: Iterable[Sequence[Any]]) -> SegmentTable[Any]:
        return cls({(Mark(kind), unit): values for kind, unit, values in data})
