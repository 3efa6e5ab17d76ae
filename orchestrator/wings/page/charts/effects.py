"""Draws the change that each value of a setting made: its median over pairs, and their range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.wings.page.charts.frame import AXIS_HEIGHT, WIDTH, axis_below, head, whisker
from orchestrator.wings.page.charts.palette import SeriesStyle
from orchestrator.wings.page.charts.scale import AxisUnit, Scale, padded_range
from orchestrator.wings.page.charts.shapes import SMALL_PX, Label, Marker, Picture, Shape, Stroke, shortened, text_width

ROW_PX = 19.0
NAME_LETTERS = 30
GAP_PX = 34.0


@dataclass(frozen=True)
class EffectRow:
    """A value of a setting. changes: (lowest, median, highest) for each panel; None if there is no pair to compare.
    heading: it is the name of a setting and has no changes."""

    name: str
    changes: tuple[tuple[float, float, float] | None, ...] = ()
    note: str = ""
    heading: bool = False


@dataclass(frozen=True)
class Panel:
    """One of the panels next to each other, which share their rows. text: how a change is written in tips."""

    name: str
    unit: AxisUnit
    style: SeriesStyle
    text: Callable[[float], str]


def effects(title: str, panels: Sequence[Panel], rows: Sequence[EffectRow]) -> Picture:
    """The rows, with a dot for the median and a whisker for the range in each panel."""
    shapes, top = head(title, ())
    names = max(text_width(shortened(row.name, NAME_LETTERS)) for row in rows)
    notes = max(text_width(row.note, SMALL_PX) for row in rows)
    left = 24 + names
    width = (WIDTH - left - notes - 16 - (len(panels) - 1) * GAP_PX) / len(panels)
    bottom = top + len(rows) * ROW_PX + 4
    for index, panel in enumerate(panels):
        start = left + index * (width + GAP_PX)
        scale = Scale(*_range(rows, index), start, start + width)
        shapes += axis_below(scale, panel.unit, panel.name, top, bottom, 4)
        shapes.append(Stroke(((scale.at(0), top), (scale.at(0), bottom)), "muted", 1.4))
        for number, row in enumerate(rows):
            shapes += _changes(row, index, scale, (top + (number + 0.5) * ROW_PX + 2, panel))
    for number, row in enumerate(rows):
        y = top + (number + 0.5) * ROW_PX + 6
        name = shortened(row.name, NAME_LETTERS)
        shapes.append(Label(8 if row.heading else 20, y, name, bold=row.heading, tip=row.name))
        shapes.append(Label(WIDTH - notes - 8, y, row.note, SMALL_PX, "muted"))
    return Picture(title, WIDTH, bottom + AXIS_HEIGHT, tuple(shapes))


def _range(rows: Sequence[EffectRow], index: int) -> tuple[float, float]:
    ends = [end for row in rows if row.changes and (change := row.changes[index]) for end in (change[0], change[2])]
    return padded_range([0.0, *ends])


def _changes(row: EffectRow, index: int, scale: Scale, at: tuple[float, Panel]) -> list[Shape]:
    y, panel = at
    change = row.changes[index] if row.changes else None
    if change is None:
        return []
    low, middle, high = change
    tip = f"{row.name}: {panel.text(middle)}, from {panel.text(low)} to {panel.text(high)}"
    colour, marker = panel.style.colour, panel.style.marker
    shapes: list[Shape] = [] if low == high else whisker((scale.at(low), y), (scale.at(high), y), colour)
    return [*shapes, Marker(scale.at(middle), y, marker, colour, 4.5, tip=tip)]
