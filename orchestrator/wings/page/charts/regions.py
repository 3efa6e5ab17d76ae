"""Draws amounts over time as stacked areas, with phases above them and the moment of the peak."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.wings.page.charts import canvas
from orchestrator.wings.page.charts.bar_data import BarPart
from orchestrator.wings.page.charts.canvas import LETTER_PX, WIDTH, Picture
from orchestrator.wings.page.charts.palette import LIGHT, SeriesStyle

HEIGHT = 300.0
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
    picture = canvas.blank(chart.title, legend, HEIGHT)
    axes = picture.axes
    totals = [sum(values[at] for _, values in parts) for at in range(len(chart.starts))]
    highest = max([*totals, chart.peak[1] if chart.peak else 0.0], default=0.0) * ROOM or 1.0
    begin, end = chart.starts[0], max(chart.end, chart.starts[0] + 1e-9)
    axes.set(xlim=(begin, end), ylim=(0, highest))
    canvas.numbers(axes, "y", chart.y_unit, chart.y_name)
    canvas.numbers(axes, "x", chart.x_unit, chart.x_name)
    below = [0.0] * len(chart.starts)
    for part, values in parts:
        above = [low + value for low, value in zip(below, values, strict=True)]
        area = axes.stairs(above, [*chart.starts, end], baseline=below, fill=True, **canvas.paint_style(part.paint))
        most = max(values) / chart.y_unit.divisor
        picture.mark(area, tip=f"{part.name}: at most {most:,.4g} {chart.y_unit.name}")
        below = above
    for name, start, stop in chart.spans:
        look = {"color": LIGHT["muted"], "linewidth": 1, "linestyle": (0, (3, 3))}
        picture.mark(axes.axvline(start, **look), tip=name)
        if len(name) * LETTER_PX <= (stop - start) / (end - begin) * WIDTH * 0.85:  # its part of the axes
            picture.text(start, 1.01, name, color=LIGHT["muted"], transform=axes.get_xaxis_transform())
    if chart.peak is not None:
        at, amount, text = chart.peak
        look = {"linestyle": "none", "clip_on": False, **canvas.marker_style(SeriesStyle("ink", "down"), 5)}
        picture.mark(axes.plot([at], [amount], **look)[0], tip=text)
        picture.name((at, amount), text)
    return picture
