"""Draws a bar chart: a row with its name for each bar, or thin columns if there are too many for names."""

from __future__ import annotations

from typing import Any

from orchestrator.wings.page.charts import canvas
from orchestrator.wings.page.charts.bar_data import Bar, BarChart, axis_end, stacked
from orchestrator.wings.page.charts.canvas import SMALL_PX, WIDTH, Picture, text_width
from orchestrator.wings.page.charts.palette import LIGHT, SeriesStyle

MOST_ROWS = 32
ROW_PX, BAR = 21.0, 0.62  # a row's height, and the part of it that is its bar
LABEL_LETTERS = 40
COLUMNS_HEIGHT = 260.0
LACKING = SeriesStyle("vermilion", "cross")


def picture_of(chart: BarChart) -> Picture:
    """The chart as a picture of the width of all pictures."""
    return _columns(chart) if len(chart.bars) > MOST_ROWS else _rows(chart)


def _tip(chart: BarChart, bar: Bar) -> str:
    """What the mouse shows: the name, the parts if there are several, and the note."""
    parts = [
        f"{part.name} {(end - start) / chart.unit.divisor:,.4g} {chart.unit.name}"
        for part, start, end in stacked(bar, chart.parts)
        if len(chart.parts) > 1
    ]
    return "; ".join(filter(None, [f"{bar.place} {bar.label}".strip(), *parts, bar.note]))


def _line(axes: Any, ends: tuple[tuple[float, float], tuple[float, float]], **look: Any) -> Any:
    (line,) = axes.plot(*zip(*ends, strict=True), **{"color": LIGHT["ink"], "linewidth": 2, "clip_on": False, **look})
    return line


# ---- a row for each bar ---------------------------------------------------------------------------------------------


def _rows(chart: BarChart) -> Picture:
    places = max((text_width(bar.place) for bar in chart.bars), default=0.0)
    names = max((text_width(canvas.shortened(bar.label, LABEL_LETTERS)) for bar in chart.bars), default=0.0)
    notes = max((text_width(bar.note, SMALL_PX) for bar in chart.bars), default=0.0)
    left = 8 + places + (8 if places else 0) + names + 8
    right = max(WIDTH - notes - 16, left + 120)
    height = len(chart.bars) * ROW_PX + 4
    picture, top = canvas.blank(chart.title, chart.legend(), height, max(WIDTH, right + notes + 16))
    axes = picture.axes(left, right, top, top + height)
    axes.set(xlim=(0, axis_end(chart) / chart.unit.divisor), ylim=(len(chart.bars) + 2 / ROW_PX, -2 / ROW_PX))
    canvas.numbers(axes, "x", chart.unit.named(chart.axis))
    if chart.limit is not None and chart.limit <= axis_end(chart):
        at = chart.limit / chart.unit.divisor
        picture.mark(axes.axvline(at, color=LIGHT["vermilion"], linewidth=2, zorder=3), tip=chart.limit_name)
    for number, bar in enumerate(chart.bars):
        down = top + (number + 0.5) * ROW_PX + 6
        name = canvas.shortened(bar.label, LABEL_LETTERS)
        picture.mark(picture.text(8, down, bar.place, fontsize=canvas.FONT_PX, color=LIGHT["muted"]), bar.key)
        picture.mark(picture.text(left - 8, down, name, fontsize=canvas.FONT_PX, ha="right"), bar.key)
        picture.mark(picture.text(right + 8, down, bar.note, color=LIGHT["muted"]), bar.key)
        for artist in _row_of(chart, bar, axes, number + 0.5):
            picture.mark(artist, bar.key)
        # One shape takes the mouse for the whole row, its texts included.
        hit = picture.paper.barh(down - 4, picture.width, ROW_PX, color="none")[0]
        picture.mark(hit, bar.key, _tip(chart, bar))
    return picture


def _row_of(chart: BarChart, bar: Bar, axes: Any, middle: float) -> list[Any]:
    unit, artists = chart.unit.divisor, list[Any]()
    for part, start, end in stacked(bar, chart.parts):
        look = canvas.paint_style(bar.paint or part.paint)
        artists += axes.barh(middle, (end - start) / unit, BAR, left=start / unit, clip_on=False, zorder=2, **look)
    if bar.lacking:
        right = 7 / axes.bbox.width * axis_end(chart) / unit
        artists += axes.plot([right], [middle], linestyle="none", **canvas.marker_style(LACKING, 4.5), zorder=3)
    if bar.outline is not None:
        end = min(bar.outline, axis_end(chart)) / unit
        artists += axes.barh(middle, end, BAR + 0.19, clip_on=False, zorder=4, **canvas.DASHED_STYLE)
        if bar.outline > axis_end(chart):  # it goes on beyond the axis
            look = {"color": LIGHT["ink"], "linestyle": "none", "marker": 5, "markersize": 8, "clip_on": False}
            artists += axes.plot([end], [middle], zorder=4, **look)
    if bar.tick is not None:
        at = bar.tick / unit
        artists.append(_line(axes, ((at, middle - BAR * 0.75), (at, middle + BAR * 0.75)), zorder=4))
    if bar.spread is not None:
        low, high = (end / unit for end in bar.spread)
        artists.append(canvas.whisker(axes, (low, middle), (high, middle), "ink"))
    return artists


# ---- a column for each bar ------------------------------------------------------------------------------------------


def _columns(chart: BarChart) -> Picture:
    bars = [bar for bar in chart.bars if not bar.lacking]
    left_out = len(chart.bars) - len(bars)
    picture, top = canvas.blank(chart.title, chart.legend(), COLUMNS_HEIGHT)
    axes = picture.axes(74, WIDTH - 16, top, top + COLUMNS_HEIGHT)
    highest = axis_end(chart, bars) / chart.unit.divisor
    axes.set(xlim=(0.5, len(bars) + 0.5), ylim=(0, highest))
    more = f"; {left_out} without a value are in the table" if left_out else ""
    canvas.numbers(axes, "x", f"{len(bars)} points, in the order of the table{more}", 8)
    axes.grid(visible=False, axis="x")
    canvas.numbers(axes, "y", chart.unit.named(chart.axis))
    if chart.limit is not None and chart.limit / chart.unit.divisor <= highest:
        at = chart.limit / chart.unit.divisor
        picture.mark(axes.axhline(at, color=LIGHT["vermilion"], linewidth=2, zorder=3), tip=chart.limit_name)
    for number, bar in enumerate(bars, start=1):
        for artist in _column_of(chart, bar, axes, number):
            picture.mark(artist, bar.key)
        hit = axes.bar(number, highest, 1, color="none", clip_on=False, zorder=9)[0]
        picture.mark(hit, bar.key, _tip(chart, bar))
    return picture


def _column_of(chart: BarChart, bar: Bar, axes: Any, x: int) -> list[Any]:
    unit, artists = chart.unit.divisor, list[Any]()
    for part, start, end in stacked(bar, chart.parts):
        look = canvas.paint_style(bar.paint or part.paint)
        artists += axes.bar(x, (end - start) / unit, 0.85, bottom=start / unit, clip_on=False, zorder=2, **look)
    for value, dash in ((bar.outline, (0, (2, 1))), (bar.tick, "-")):
        if value is not None:
            at = min(value / unit, axes.get_ylim()[1])
            ends = ((x - 0.5, at), (x + 0.5, at))
            artists.append(_line(axes, ends, linestyle=dash, linewidth=1.4, zorder=4))
    if bar.spread is not None:
        low, high = (end / unit for end in bar.spread)
        artists.append(_line(axes, ((x, low), (x, high)), linewidth=1, zorder=4))
    return artists
