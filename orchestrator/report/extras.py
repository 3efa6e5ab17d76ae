"""What wings add to a comparison: columns, cells of results.csv, rows of one run, and lines after the conclusion.

Each module in wings.EXTRAS has the functions of this one, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.report.entry import Entry
from orchestrator.report.summary import Row
from orchestrator.text.units import ABSENT
from orchestrator.wings import EXTRAS, load


class ExtraColumn(NamedTuple):
    """A column of the comparison. values: of each entry; None if it is not known. on_screen: not in the page alone."""

    title: str
    values: Sequence[float | None]
    text: Callable[[float], str]
    on_screen: bool = True

    def cell(self, number: int) -> str:
        """The text of an entry."""
        value = self.values[number]
        return ABSENT if value is None else self.text(value)


def columns(entries: Sequence[Entry]) -> list[ExtraColumn]:
    """Those of which some entry has a value."""
    found: list[ExtraColumn] = [one for place in EXTRAS for one in load(place).columns(entries)]
    return [one for one in found if any(value is not None for value in one.values)]


def cells(entry: Entry) -> dict[str, object]:
    """The columns of results.csv by their names; None for what is not known."""
    return {name: value for place in EXTRAS for name, value in load(place).cells(entry).items()}


def rows(result: Mapping[str, Any], config: Mapping[str, Any]) -> list[Row]:
    """What the summary of one run says besides."""
    return [row for place in EXTRAS for row in load(place).rows(result, config)]


def lines(entries: Sequence[Entry]) -> list[str]:
    """Points that are named besides the fastest; the entries have results."""
    return [line for place in EXTRAS for line in load(place).lines(entries)]
