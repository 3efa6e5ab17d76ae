"""The numbers of a bar chart, and how long its axis is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from orchestrator.wings.page.charts.canvas import DASHED, AxisUnit, LegendEntry
from orchestrator.wings.page.charts.palette import Paint

# An outline, a limit or a bar without parts may make the axis this many times as long as the parts and ranges need.
# What is longer ends at the axis' end, and its number is written there.
MOST_STRETCH = 2.5
MOST_TIMES = 10  # a length of more than so many times the middle one would make all others invisible


class BarPart(NamedTuple):
    """One of the stacked parts of each bar."""

    name: str
    paint: Paint


@dataclass(frozen=True)
class Bar:
    """One bar, in base units of the axis.

    lengths: of its parts, in the order of the chart's. spread: the ends of its whisker. outline: a length to compare
    with. tick: a further value on it. note: written at its end. paint: in place of that of its only part. key: the
    number of its row in the table, if it has one. lacking: it has no value; a cross stands at 0.
    """

    label: str
    lengths: tuple[float, ...]
    key: int | None = None
    spread: tuple[float, float] | None = None
    outline: float | None = None
    tick: float | None = None
    note: str = ""
    paint: Paint | None = None
    lacking: bool = False

    @property
    def total(self) -> float:
        return sum(self.lengths)


@dataclass(frozen=True)
class BarChart:
    """Bars that share an axis. axis: what it shows, without the unit. limit: of what fits, drawn as a line."""

    title: str
    axis: str
    unit: AxisUnit
    parts: tuple[BarPart, ...]
    bars: tuple[Bar, ...]
    limit: float | None = None
    limit_name: str = ""
    outline_name: str = ""
    tick_name: str = ""
    more_legend: tuple[LegendEntry, ...] = ()
    cuts: bool = False  # bars that would make most others invisible go on beyond the axis

    def legend(self) -> list[LegendEntry]:
        """The parts, if there are several, and the other signs that some bar has."""
        entries = [LegendEntry(part.name, part.paint) for part in self.parts] if len(self.parts) > 1 else []
        entries += self.more_legend
        if any(bar.outline is not None for bar in self.bars):
            entries.append(LegendEntry(self.outline_name, DASHED))
        if any(bar.tick is not None for bar in self.bars):
            entries.append(LegendEntry(self.tick_name, "ink"))
        if self.limit is not None:
            beyond = "" if self.limit <= axis_end(self) else ", beyond this picture"
            entries.append(LegendEntry(f"{self.limit_name}{beyond}", "vermilion"))
        return entries


def axis_end(chart: BarChart) -> float:
    """The highest value of the axis, which starts at 0."""
    solid = [max(bar.total, bar.tick or 0.0, bar.spread[1] if bar.spread else 0.0) for bar in chart.bars]
    needed = largest_seen(solid) if chart.cuts else max(solid, default=0.0)
    others = [bar.outline for bar in chart.bars if bar.outline is not None]
    others += [chart.limit] if chart.limit is not None else []
    if needed <= 0:
        needed = min(others, default=0.0) or 1.0
    return 1.04 * max([needed, *(other for other in others if other <= MOST_STRETCH * needed)])


def largest_seen(lengths: Sequence[float]) -> float:
    """The largest length that an axis shows which is not to hide the others."""
    known = [length for length in lengths if length > 0]
    return max((one for one in known if one <= MOST_TIMES * median_low(known)), default=0.0)


def stacked(bar: Bar, parts: Sequence[BarPart]) -> list[tuple[BarPart, float, float]]:
    """The parts of a bar that have a length, with where each starts and ends."""
    found, start = [], 0.0
    for part, length in zip(parts, bar.lengths, strict=True):
        if length > 0:
            found.append((part, start, start + length))
            start += length
    return found
