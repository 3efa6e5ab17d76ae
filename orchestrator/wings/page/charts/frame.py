"""What the charts share: title, legend, axes with ticks, and the ends of ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.wings.page.charts.palette import Paint, SeriesStyle
from orchestrator.wings.page.charts.scale import AxisUnit, Scale, tick_step, tick_text, ticks
from orchestrator.wings.page.charts.shapes import SMALL_PX, TITLE_PX, Area, Label, Marker, Shape, Stroke, text_width

WIDTH = 760.0
TITLE_HEIGHT, LEGEND_HEIGHT, AXIS_HEIGHT = 26.0, 19.0, 42.0
SWATCH_PX = 12.0
DASHED = "dashed"
Marks = Sequence[tuple[float, str]]
CAP_PX = 3.0  # half the length of the line that ends a whisker


class LegendEntry(NamedTuple):
    """A name and its sign: an area's paint, a series' style, DASHED for a dashed outline, or the colour of a line.
    with_line: a series' line is shown with its marker."""

    name: str
    sign: Paint | SeriesStyle | str
    with_line: bool = True


def head(title: str, legend: Sequence[LegendEntry], width: float = WIDTH) -> tuple[list[Shape], float]:
    """The title and the legend below it, and where they end."""
    shapes: list[Shape] = [Label(8, 17, title, TITLE_PX, bold=True)]
    x, y = 10.0, TITLE_HEIGHT
    for entry in legend:
        needed = SWATCH_PX + 22 + text_width(entry.name, SMALL_PX)
        if x > 10 and x + needed > width:
            x, y = 10.0, y + LEGEND_HEIGHT
        shapes += _swatch(entry, x, y + 3)
        shapes.append(Label(x + SWATCH_PX + 11, y + 13, entry.name, SMALL_PX))
        x += needed
    return shapes, y + (LEGEND_HEIGHT + 5 if legend else 4)


def _swatch(entry: LegendEntry, x: float, y: float) -> list[Shape]:
    sign, middle = entry.sign, y + SWATCH_PX / 2
    if isinstance(sign, Paint):
        return [Area(x, y, SWATCH_PX + 4, SWATCH_PX - 1, sign)]
    if isinstance(sign, SeriesStyle):
        line = Stroke(((x - 2, middle), (x + SWATCH_PX + 6, middle)), sign.colour, 1.8, sign.dash)
        return [
            *([line] if entry.with_line else []),
            Marker(x + SWATCH_PX / 2 + 2, middle, sign.marker, sign.colour, 4),
        ]
    if sign == DASHED:
        return [Area(x, y, SWATCH_PX + 4, SWATCH_PX - 1, None, "ink", dashed=True)]
    return [Stroke(((x + SWATCH_PX / 2 + 2, y - 1), (x + SWATCH_PX / 2 + 2, y + SWATCH_PX)), sign, 2)]


def axis_below(
    scale: Scale, unit: AxisUnit, name: str, top: float, bottom: float, wanted: int = 6, marks: Marks = ()
) -> list[Shape]:
    """A horizontal axis at `bottom` with lines up to `top`. name: what it shows; the unit is added. marks: values with
    their texts, in place of about `wanted` round numbers."""
    shapes: list[Shape] = []
    for value, text in marks or _marks(scale, unit, wanted):
        x = scale.at(value)
        shapes.append(Stroke(((x, top), (x, bottom)), "grid"))
        shapes.append(Label(x, bottom + 15, text, SMALL_PX, "muted", "middle"))
    middle = (scale.start_px + scale.end_px) / 2
    shapes.append(Stroke(((scale.start_px, bottom), (scale.end_px, bottom)), "muted"))
    shapes.append(Label(middle, bottom + 33, with_unit(name, unit), SMALL_PX, "ink", "middle"))
    return shapes


def axis_left(scale: Scale, unit: AxisUnit, name: str, left: float, right: float, wanted: int = 6) -> list[Shape]:
    """A vertical axis at `left` with lines to `right`."""
    shapes: list[Shape] = []
    for value, text in _marks(scale, unit, wanted):
        y = scale.at(value)
        shapes.append(Stroke(((left, y), (right, y)), "grid"))
        shapes.append(Label(left - 6, y + 4, text, SMALL_PX, "muted", "end"))
    middle = (scale.start_px + scale.end_px) / 2
    shapes.append(Stroke(((left, scale.start_px), (left, scale.end_px)), "muted"))
    shapes.append(Label(14, middle, with_unit(name, unit), SMALL_PX, "ink", "middle", turned=True))
    return shapes


def _marks(scale: Scale, unit: AxisUnit, wanted: int) -> list[tuple[float, str]]:
    """Round numbers of the unit, as values of the scale with their texts."""
    low, high = scale.low / unit.divisor, scale.high / unit.divisor
    step = tick_step(high - low, wanted)
    return [(value * unit.divisor, tick_text(value, step)) for value in ticks(low, high, wanted)]


def with_unit(name: str, unit: AxisUnit) -> str:
    """The text of an axis: "memory of a rank [GiB]", or what there is of name and unit."""
    return f"{name} [{unit.name}]" if name and unit.name else name or unit.name


def whisker(low: tuple[float, float], high: tuple[float, float], colour: str, key: int | None = None) -> list[Shape]:
    """A line between two points on a horizontal or vertical line, with a cap at each end."""
    level = low[1] == high[1]
    right, down = (0.0, CAP_PX) if level else (CAP_PX, 0.0)
    lines = [(low, high), *(((x - right, y - down), (x + right, y + down)) for x, y in (low, high))]
    return [Stroke(ends, colour, 1.3, key=key) for ends in lines]
