"""Draws a bar chart: a row with its name for each bar, or thin columns if there are too many for names."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.wings.page.charts.bar_data import Bar, BarChart, axis_end, stacked
from orchestrator.wings.page.charts.frame import AXIS_HEIGHT, WIDTH, axis_below, axis_left, head, whisker
from orchestrator.wings.page.charts.scale import Scale, tick_text, ticks
from orchestrator.wings.page.charts.shapes import (
    SMALL_PX,
    Area,
    Label,
    Marker,
    Picture,
    Shape,
    Stroke,
    shortened,
    text_width,
)

MOST_ROWS = 32
ROW_PX, BAR_PX = 21.0, 13.0
LABEL_LETTERS = 40
COLUMNS_HEIGHT = 260.0


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


# ---- a row for each bar ---------------------------------------------------------------------------------------------


def _rows(chart: BarChart) -> Picture:
    shapes, top = head(chart.title, chart.legend())
    places = max((text_width(bar.place) for bar in chart.bars), default=0.0)
    names = max((text_width(shortened(bar.label, LABEL_LETTERS)) for bar in chart.bars), default=0.0)
    notes = max((text_width(bar.note, SMALL_PX) for bar in chart.bars), default=0.0)
    left = 8 + places + (8 if places else 0) + names + 8
    scale = Scale(0.0, axis_end(chart), left, max(WIDTH - notes - 16, left + 120))
    bottom = top + len(chart.bars) * ROW_PX + 4
    shapes += axis_below(scale, chart.unit, chart.axis, top, bottom)
    for number, bar in enumerate(chart.bars):
        middle = top + (number + 0.5) * ROW_PX + 2
        hit = Area(0, middle - ROW_PX / 2, WIDTH, ROW_PX, key=bar.key, tip=_tip(chart, bar))
        shapes += [
            Label(8, middle + 4, bar.place, colour="muted", key=bar.key),
            Label(left - 8, middle + 4, shortened(bar.label, LABEL_LETTERS), anchor="end", key=bar.key),
            *_row_of(chart, bar, scale, middle),
            Label(scale.end_px + 8, middle + 4, bar.note, SMALL_PX, "muted", key=bar.key),
            hit,
        ]
    if chart.limit is not None and chart.limit <= scale.high:
        x = scale.at(chart.limit)
        shapes.append(Stroke(((x, top), (x, bottom)), "vermilion", 2, tip=chart.limit_name))
    width = max(WIDTH, scale.end_px + notes + 16)
    return Picture(chart.title, width, bottom + AXIS_HEIGHT, tuple(shapes))


def _row_of(chart: BarChart, bar: Bar, scale: Scale, middle: float) -> list[Shape]:
    top = middle - BAR_PX / 2
    shapes: list[Shape] = []
    if bar.lacking:
        shapes.append(Marker(scale.start_px + 7, middle, "cross", "vermilion", 4.5, bar.key))
    for part, start, end in stacked(bar, chart.parts):
        x, length = scale.at(start), scale.at(end) - scale.at(start)
        shapes.append(Area(x, top, length, BAR_PX, bar.paint or part.paint, "paper", key=bar.key))
    if bar.outline is not None:
        x = scale.at(bar.outline)
        shapes.append(Area(scale.start_px, top - 2, x - scale.start_px, BAR_PX + 4, None, "ink", True, bar.key))
        if bar.outline > scale.high:  # it goes on beyond the axis
            shapes.append(Stroke(((x - 5, top), (x + 1, middle), (x - 5, top + BAR_PX)), "ink", 1.6, key=bar.key))
    if bar.tick is not None:
        x = scale.at(bar.tick)
        shapes.append(Stroke(((x, top - 3), (x, top + BAR_PX + 3)), "ink", 2, key=bar.key))
    if bar.spread is not None:
        low, high = map(scale.at, bar.spread)
        shapes += whisker((low, middle), (high, middle), "ink", bar.key)
    return shapes


# ---- a column for each bar ------------------------------------------------------------------------------------------


def _columns(chart: BarChart) -> Picture:
    bars = [bar for bar in chart.bars if not bar.lacking]
    left_out = len(chart.bars) - len(bars)
    shapes, top = head(chart.title, chart.legend())
    values = Scale(0.0, axis_end(replace(chart, bars=tuple(bars))), top + COLUMNS_HEIGHT, top + 6)
    left, right, bottom = 74.0, WIDTH - 16, top + COLUMNS_HEIGHT
    shapes += axis_left(values, chart.unit, chart.axis, left, right)
    width = (right - left) / max(1, len(bars))
    for number, bar in enumerate(bars):
        shapes += _column_of(chart, bar, values, (left + number * width, width))
    if chart.limit is not None and chart.limit <= values.high:
        y = values.at(chart.limit)
        shapes.append(Stroke(((left, y), (right, y)), "vermilion", 2, tip=chart.limit_name))
    shapes += _numbers_below(len(bars), left, width, bottom)
    more = f"; {left_out} without a value are in the table" if left_out else ""
    name = f"{len(bars)} points, in the order of the table{more}"
    shapes.append(Label((left + right) / 2, bottom + 33, name, SMALL_PX, "ink", "middle"))
    return Picture(chart.title, WIDTH, bottom + AXIS_HEIGHT, tuple(shapes))


def _column_of(chart: BarChart, bar: Bar, values: Scale, place: tuple[float, float]) -> list[Shape]:
    x, width = place
    shapes: list[Shape] = []
    gap = 0.8 if width > 3 else 0.0
    for part, start, end in stacked(bar, chart.parts):
        y = values.at(end)
        paint = bar.paint or part.paint
        shapes.append(Area(x, y, width - gap, values.at(start) - y, paint, key=bar.key))
    middle = x + (width - gap) / 2
    if bar.outline is not None:
        y = values.at(bar.outline)
        shapes.append(Stroke(((x, y), (x + width, y)), "ink", 1.4, (3, 1.5), bar.key))
    if bar.tick is not None:
        y = values.at(bar.tick)
        shapes.append(Stroke(((x, y), (x + width, y)), "ink", 2, key=bar.key))
    if bar.spread is not None:
        low, high = map(values.at, bar.spread)
        shapes.append(Stroke(((middle, low), (middle, high)), "ink", 1, key=bar.key))
    height = values.start_px - values.end_px
    return [*shapes, Area(x, values.end_px, width, height, key=bar.key, tip=_tip(chart, bar))]


def _numbers_below(count: int, left: float, width: float, bottom: float) -> list[Shape]:
    shapes: list[Shape] = []
    for value in [1.0, *ticks(1, count, 8)]:
        number = round(value)
        if 1 <= number <= count and (number == 1 or value == number):
            x = left + (number - 0.5) * width
            shapes.append(Label(x, bottom + 15, tick_text(number, 1), SMALL_PX, "muted", "middle"))
    return list(dict.fromkeys(shapes))
