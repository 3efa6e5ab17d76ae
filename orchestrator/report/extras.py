"""What wings add to a comparison: columns, cells of results.csv, rows of one run, lines, places and tables.

Each module in wings.COLUMNS has `columns` and `cells` of this one, and each in wings.SUMMARIES `rows` and `lines`, with
the same arguments. That of wings.PLACES has
- `apart(entries)`: why a measured row has no place beside the others, by its label; such a row neither wins nor ties;
- `tables(entries)`: the entries of each table, by its name; one table without a name for all, if that is one;
- `notes(entries)`: what is said of rows under the tables;
- `costs(configs)`: the rows of a plan about points that are run for the sake of the others;
- `next_command(entry)`: the command to propose after this winner; empty for the one after every sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.report.entry import Entry
from orchestrator.report.summary import Row
from orchestrator.text.units import ABSENT
from orchestrator.wings import COLUMNS, PLACES, SUMMARIES, load


class ExtraColumn(NamedTuple):
    """A column of the comparison. values: of each entry, by which the page sorts; None if it is not known. on_screen:
    not in the page alone."""

    title: str
    values: Sequence[float | str | None]
    texts: Sequence[str]
    on_screen: bool = True

    @classmethod
    def of_numbers(
        cls, title: str, values: Sequence[float | None], text: Callable[[float], str], *, on_screen: bool = True
    ) -> ExtraColumn:
        """A column of numbers, of which each that is known has this text."""
        return cls(title, values, [ABSENT if value is None else text(value) for value in values], on_screen)


def columns(entries: Sequence[Entry]) -> list[ExtraColumn]:
    """Those of which some entry has a value."""
    found: list[ExtraColumn] = [one for place in COLUMNS for one in load(place).columns(entries)]
    return [one for one in found if any(value is not None for value in one.values)]


def cells(entry: Entry, entries: Sequence[Entry]) -> dict[str, object]:
    """The columns of results.csv by their names, for one of the entries; None for what is not known."""
    return {name: value for place in COLUMNS for name, value in load(place).cells(entry, entries).items()}


def rows(result: Mapping[str, Any], config: Mapping[str, Any]) -> list[Row]:
    """What the summary of one run says besides."""
    return [row for place in SUMMARIES for row in load(place).rows(result, config)]


def lines(entries: Sequence[Entry]) -> list[str]:
    """Points that are named besides the fastest; the entries have results."""
    return [line for place in SUMMARIES for line in load(place).lines(entries)]


def places() -> Any:
    """The module of wings.PLACES."""
    return load(PLACES)
