"""What wings add to a comparison: columns, cells of results.csv, rows of one run, lines, places and tables.

Each module in wings.COLUMNS has `columns` and `cells` of this one, each in wings.SUMMARIES `rows` and `lines`, and that
of wings.PLACES `apart`, `tables`, `notes`, `next_command` and `costs`, with the same arguments.
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


def apart(entries: Sequence[Entry]) -> dict[str, str]:
    """Why a measured row has no place beside the others, by its label; such a row neither wins nor ties."""
    found: dict[str, str] = load(PLACES).apart(entries)
    return found


def tables(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The entries of each table of the comparison, by its name; one table without a name for all, if that is one."""
    found: dict[str, list[Entry]] = load(PLACES).tables(entries)
    return found


def notes(entries: Sequence[Entry]) -> list[str]:
    """What is said of rows under the tables."""
    found: list[str] = load(PLACES).notes(entries)
    return found


def costs(configs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What a plan says of points that are run for the sake of the others."""
    found: list[Row] = load(PLACES).costs(configs)
    return found


def next_command(entry: Entry) -> str:
    """The command that a sweep proposes after this winner; empty for what it proposes after every sweep."""
    found: str = load(PLACES).next_command(entry)
    return found
