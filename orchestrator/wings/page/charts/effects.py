"""Draws the change that each value of a setting made: its median over pairs, and their range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.wings.page.charts import canvas
from orchestrator.wings.page.charts.canvas import SMALL_PX, WIDTH, Picture, text_width
from orchestrator.wings.page.charts.palette import LIGHT, SeriesStyle
from orchestrator.wings.page.charts.planes import padded_range

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
    unit: canvas.AxisUnit
    style: SeriesStyle
    text: Callable[[float], str]


def effects(title: str, panels: Sequence[Panel], rows: Sequence[EffectRow]) -> Picture:
    """The rows, with a dot for the median and a canvas.whisker for the range in each panel."""
    height = len(rows) * ROW_PX + 4
    picture, top = canvas.blank(title, (), height)
    names = max(text_width(canvas.shortened(row.name, NAME_LETTERS)) for row in rows)
    notes = max(text_width(row.note, SMALL_PX) for row in rows)
    left = 24 + names
    width = (WIDTH - left - notes - 16 - (len(panels) - 1) * GAP_PX) / len(panels)
    for index, panel in enumerate(panels):
        start = left + index * (width + GAP_PX)
        axes = picture.axes(start, start + width, top, top + height)
        axes.set(xlim=_range(rows, index, panel.unit), ylim=(len(rows) + 2 / ROW_PX, -2 / ROW_PX))
        canvas.numbers(axes, "x", panel.unit.named(panel.name), 4)
        axes.axvline(0, color=LIGHT["muted"], linewidth=1.4)
        for number, row in enumerate(rows):
            _change(picture, axes, row, index, (number + 0.5, panel))
    for number, row in enumerate(rows):
        y, name = top + (number + 0.5) * ROW_PX + 6, canvas.shortened(row.name, NAME_LETTERS)
        weight = "bold" if row.heading else "normal"
        picture.mark(
            picture.text(8 if row.heading else 20, y, name, fontsize=canvas.FONT_PX, fontweight=weight), tip=row.name
        )
        picture.text(WIDTH - notes - 8, y, row.note, color=LIGHT["muted"])
    return picture


def _range(rows: Sequence[EffectRow], index: int, unit: canvas.AxisUnit) -> tuple[float, float]:
    ends = [end for row in rows if row.changes and (change := row.changes[index]) for end in (change[0], change[2])]
    low, high = padded_range([0.0, *ends])
    return low / unit.divisor, high / unit.divisor


def _change(picture: Picture, axes: Any, row: EffectRow, index: int, at: tuple[float, Panel]) -> None:
    y, panel = at
    change = row.changes[index] if row.changes else None
    if change is None:
        return
    low, middle, high = (end / panel.unit.divisor for end in change)
    texts = [panel.text(end) for end in change]
    if low != high:
        canvas.whisker(axes, (low, y), (high, y), panel.style.colour)
    (dot,) = axes.plot(
        [middle], [y], linestyle="none", clip_on=False, zorder=4, **canvas.marker_style(panel.style, 4.5)
    )
    picture.mark(dot, tip=f"{row.name}: {texts[1]}, from {texts[0]} to {texts[2]}")
