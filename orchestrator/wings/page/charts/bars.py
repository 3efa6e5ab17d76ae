"""Draws a bar chart: a row with its name for each bar."""

from __future__ import annotations

from typing import Any

from orchestrator.wings.page.charts import canvas
from orchestrator.wings.page.charts.bar_data import Bar, BarChart, axis_end, stacked
from orchestrator.wings.page.charts.canvas import Picture
from orchestrator.wings.page.charts.palette import LIGHT, SeriesStyle

MOST_ROWS = 40
ROW_PX, BAR = 21.0, 0.62  # a row's height, and the part of it that is its bar
LABEL_LETTERS = 40
LACKING = SeriesStyle("vermilion", "cross")


def picture_of(chart: BarChart) -> Picture:
    """The chart as a picture of the width of all pictures, of its first rows."""
    rows, end = chart.bars[:MOST_ROWS], axis_end(chart)
    picture = canvas.blank(chart.title, chart.legend(), len(rows) * ROW_PX)
    axes = picture.axes
    axes.set(xlim=(0, end), ylim=(max(len(rows), 1), 0))
    more = "" if len(rows) == len(chart.bars) else f" (the first {len(rows)} of {len(chart.bars)} rows)"
    canvas.numbers(axes, "x", chart.unit, chart.axis)
    axes.set_xlabel(axes.get_xlabel() + more)
    middles = [number + 0.5 for number in range(len(rows))]
    axes.set_yticks(middles, [canvas.shortened(bar.label, LABEL_LETTERS) for bar in rows], parse_math=False)
    axes.tick_params(axis="y", labelleft=True, labelsize=canvas.FONT_PX, labelcolor=LIGHT["ink"])
    if chart.limit is not None and chart.limit <= end:
        picture.mark(axes.axvline(chart.limit, color=LIGHT["vermilion"], linewidth=2, zorder=3), tip=chart.limit_name)
    for bar, middle, name in zip(rows, middles, axes.get_yticklabels(), strict=True):
        across = axes.get_yaxis_transform()  # x from 0 to 1 over the axes
        note = picture.text(1.01, middle, bar.note, color=LIGHT["muted"], va="center", transform=across)
        for artist in (name, note, *_row_of(chart, bar, axes, middle)):
            picture.mark(artist, bar.key)
        picture.mark(axes.axhspan(middle - 0.5, middle + 0.5, color="none"), bar.key, _tip(chart, bar))
    return picture


def _tip(chart: BarChart, bar: Bar) -> str:
    """What the mouse shows: the name, the parts if there are several, and the note."""
    parts = [
        f"{part.name} {(end - start) / chart.unit.divisor:,.4g} {chart.unit.name}"
        for part, start, end in stacked(bar, chart.parts)
        if len(chart.parts) > 1
    ]
    return "; ".join(filter(None, [bar.label, *parts, bar.note]))


def _row_of(chart: BarChart, bar: Bar, axes: Any, middle: float) -> list[Any]:
    artists, axis_ends = list[Any](), axis_end(chart)
    for part, start, end in stacked(bar, chart.parts):
        look = canvas.paint_style(bar.paint or part.paint)
        start, end = min(start, axis_ends), min(end, axis_ends)
        artists += axes.barh(middle, end - start, BAR, left=start, clip_on=False, zorder=2, **look)
    if bar.lacking:
        look = {"linestyle": "none", **canvas.marker_style(LACKING, 4.5)}
        artists += axes.plot([0.01 * axis_ends], [middle], zorder=3, **look)
    if bar.outline is not None:
        end = min(bar.outline, axis_ends)
        artists += axes.barh(middle, end, BAR + 0.19, clip_on=False, zorder=4, **canvas.DASHED_STYLE)
    if max(bar.outline or 0.0, bar.total) > axis_ends:  # it goes on beyond the axis
        look = {"color": LIGHT["ink"], "linestyle": "none", "marker": 5, "markersize": 8, "clip_on": False}
        artists += axes.plot([axis_ends], [middle], zorder=4, **look)
    if bar.tick is not None and bar.tick <= axis_ends:
        reach = BAR * 0.75
        artists.append(axes.vlines(bar.tick, middle - reach, middle + reach, LIGHT["ink"], linewidth=2, zorder=4))
    if bar.spread is not None:
        low, high = bar.spread
        artists.append(canvas.whisker(axes, (low, middle), (high, middle), "ink"))
    return artists
