"""Draws amounts over time as stacked areas, with phases above them and the moment of the peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.wings.page.charts import canvas
from orchestrator.wings.page.charts.bar_data import BarPart
from orchestrator.wings.page.charts.canvas import SMALL_PX, WIDTH, Picture, text_width
from orchestrator.wings.page.charts.palette import LIGHT, SeriesStyle

HEIGHT = 300.0
NAMES_PX = 20  # above the areas, for the names of the spans
LEFT, RIGHT = 78.0, WIDTH - 18
ROOM = 1.12  # of the highest amount, for the name of the peak


@dataclass(frozen=True)
class StackedAreas:
    """Amounts of several parts from each of `starts` to the next, the last one to `end`, in base units of the axes.

    spans: names of times, as (name, start, end). peak: (time, amount, text).
    """

    title: str
    x_name: str
    x_unit: canvas.AxisUnit
    y_name: str
    y_unit: canvas.AxisUnit
    starts: tuple[float, ...]
    end: float
    parts: tuple[tuple[BarPart, tuple[float, ...]], ...]
    spans: tuple[tuple[str, float, float], ...] = ()
    peak: tuple[float, float, str] | None = None


def stacked_areas(chart: StackedAreas) -> Picture:
    """The chart as a picture of the width of all pictures. Parts that are never above 0 are left out."""
    parts = [(part, values) for part, values in chart.parts if max(values, default=0) > 0]
    legend = [canvas.LegendEntry(part.name, part.paint) for part, _ in reversed(parts)]
    picture, top = canvas.blank(chart.title, legend, NAMES_PX + HEIGHT)
    axes = picture.axes(LEFT, RIGHT, top + NAMES_PX, top + NAMES_PX + HEIGHT)
    totals = [sum(values[at] for _, values in parts) for at in range(len(chart.starts))]
    highest = max([*totals, chart.peak[1] if chart.peak else 0.0], default=0.0) * ROOM or 1.0
    end, unit = max(chart.end, chart.starts[0] + 1e-9), chart.y_unit.divisor
    axes.set(xlim=(chart.starts[0], end), ylim=(0, highest / unit))
    canvas.numbers(axes, "y", chart.y_unit.named(chart.y_name))
    canvas.numbers(axes, "x", chart.x_unit.named(chart.x_name))
    below = [0.0] * len(chart.starts)
    for part, values in parts:
        above = [low + value / unit for low, value in zip(below, values, strict=True)]
        area = axes.stairs(above, [*chart.starts, end], baseline=below, fill=True, **canvas.paint_style(part.paint))
        picture.mark(area, tip=f"{part.name}: at most {max(values) / unit:,.4g} {chart.y_unit.name}")
        below = above
    for name, start, stop in chart.spans:
        look = {"color": LIGHT["muted"], "linewidth": 1, "linestyle": (0, (3, 3))}
        picture.mark(axes.axvline(start, **look), tip=name)
        x, right = (axes.transData.transform((time, 0))[0] for time in (start, stop))
        if text_width(name, SMALL_PX) + 4 <= right - x:
            picture.text(x + 3, top + NAMES_PX - 6, name, color=LIGHT["muted"])
    if chart.peak is not None:
        _peak(picture, axes, chart.peak, unit)
    return picture


def _peak(picture: Picture, axes: Any, peak: tuple[float, float, str], unit: float) -> None:
    at, amount, text = peak
    look = {"linestyle": "none", "clip_on": False, **canvas.marker_style(SeriesStyle("ink", "down"), 5)}
    picture.mark(axes.plot([at], [amount / unit], **look)[0], tip=text)
    x, y = axes.transData.transform((at, amount / unit))
    fits = x + 10 + text_width(text, SMALL_PX) < RIGHT
    place, side = (x + 9, "left") if fits else (x - 9, "right")
    picture.text(place, picture.height - y - 4, text, ha=side)
