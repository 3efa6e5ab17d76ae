"""Draws amounts over time as stacked areas, with phases above them and the moment of the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.wings.page.charts.bar_data import BarPart
from orchestrator.wings.page.charts.frame import AXIS_HEIGHT, WIDTH, LegendEntry, axis_below, axis_left, head
from orchestrator.wings.page.charts.scale import AxisUnit, Scale
from orchestrator.wings.page.charts.shapes import (
    SMALL_PX,
    FilledOutline,
    Label,
    Marker,
    Picture,
    Shape,
    Stroke,
    text_width,
)

HEIGHT = 300.0
LEFT, RIGHT = 78.0, WIDTH - 18
ROOM = 1.12  # of the highest amount, for the name of the peak


@dataclass(frozen=True)
class StackedAreas:
    """Amounts of several parts from each of `starts` to the next, the last one to `end`, in base units of the axes.

    spans: names of times, as (name, start, end). peak: (time, amount, text).
    """

    title: str
    x_name: str
    x_unit: AxisUnit
    y_name: str
    y_unit: AxisUnit
    starts: tuple[float, ...]
    end: float
    parts: tuple[tuple[BarPart, tuple[float, ...]], ...]
    spans: tuple[tuple[str, float, float], ...] = ()
    peak: tuple[float, float, str] | None = None


def stacked_areas(chart: StackedAreas) -> Picture:
    """The chart as a picture of the width of all pictures. Parts that are never above 0 are left out."""
    parts = [(part, values) for part, values in chart.parts if max(values, default=0) > 0]
    shapes, top = head(chart.title, [LegendEntry(part.name, part.paint) for part, _ in reversed(parts)])
    top += 20  # the names of the spans
    bottom = top + HEIGHT
    totals = [sum(values[at] for _, values in parts) for at in range(len(chart.starts))]
    highest = max([*totals, chart.peak[1] if chart.peak else 0.0], default=0.0) * ROOM or 1.0
    xs = Scale(chart.starts[0], max(chart.end, chart.starts[0] + 1e-9), LEFT, RIGHT)
    ys = Scale(0.0, highest, bottom, top)
    shapes += axis_left(ys, chart.y_unit, chart.y_name, LEFT, RIGHT)
    shapes += axis_below(xs, chart.x_unit, chart.x_name, top, bottom)
    below = [0.0] * len(chart.starts)
    for part, values in parts:
        above = [low + value for low, value in zip(below, values, strict=True)]
        outline = [*_steps(chart, above, xs, ys), *reversed(_steps(chart, below, xs, ys))]
        tip = f"{part.name}: at most {max(values) / chart.y_unit.divisor:,.4g} {chart.y_unit.name}"
        shapes.append(FilledOutline(tuple(outline), part.paint, "paper", tip=tip))
        below = above
    shapes += _spans(chart, xs, top, bottom)
    if chart.peak is not None:
        shapes += _peak(chart.peak, xs, ys)
    return Picture(chart.title, WIDTH, bottom + AXIS_HEIGHT, tuple(shapes))


def _steps(chart: StackedAreas, values: Sequence[float], xs: Scale, ys: Scale) -> list[tuple[float, float]]:
    """The corners of a line that is level from each start to the next; only where it changes."""
    found: list[tuple[float, float]] = []
    for start, value in zip(chart.starts, values, strict=True):
        y = ys.at(value)
        if not found:
            found.append((xs.at(start), y))
        elif y != found[-1][1]:
            found += [(xs.at(start), found[-1][1]), (xs.at(start), y)]
    return [*found, (xs.at(chart.end), found[-1][1])]


def _spans(chart: StackedAreas, xs: Scale, top: float, bottom: float) -> list[Shape]:
    """A line where each span begins, and its name above if there is room."""
    shapes: list[Shape] = []
    for name, start, end in chart.spans:
        x, right = xs.at(start), xs.at(end)
        shapes.append(Stroke(((x, top - 4), (x, bottom)), "muted", 1, (3, 3), tip=name))
        if text_width(name, SMALL_PX) + 4 <= right - x:
            shapes.append(Label(x + 3, top - 6, name, SMALL_PX, "muted"))
    return shapes


def _peak(peak: tuple[float, float, str], xs: Scale, ys: Scale) -> list[Shape]:
    at, amount, text = peak
    x, y = xs.at(at), ys.at(amount)
    fits = x + 10 + text_width(text, SMALL_PX) < RIGHT
    place, anchor = (x + 9, "start") if fits else (x - 9, "end")
    return [Marker(x, y, "down", "ink", 5, tip=text), Label(place, y - 4, text, SMALL_PX, "ink", anchor)]
