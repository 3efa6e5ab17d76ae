"""Draws points in two dimensions, with ranges, a front and names; and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.wings.page.charts.frame import AXIS_HEIGHT, WIDTH, LegendEntry, axis_below, axis_left, head, whisker
from orchestrator.wings.page.charts.palette import SeriesStyle
from orchestrator.wings.page.charts.scale import AxisUnit, Scale, padded_range
from orchestrator.wings.page.charts.shapes import SMALL_PX, Label, Marker, Picture, Shape, Stroke, shortened, text_width

HEIGHT = 330.0
LEFT, RIGHT = 78.0, WIDTH - 18
NAME_LETTERS = 32
MOST_MARKS = 40  # of a curve; with more, its line alone is drawn
MOST_RANGES = 60


@dataclass(frozen=True)
class Dot:
    """A point of a scatter picture. spread: the range of y. name: written next to it if there is room."""

    x: float
    y: float
    style: SeriesStyle
    key: int
    name: str = ""
    spread: tuple[float, float] | None = None
    tip: str = ""


@dataclass(frozen=True)
class LineSeries:
    """A curve through its points, in their order. spreads: the range of y at each point, or none."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: SeriesStyle
    key: int | None = None
    spreads: tuple[tuple[float, float], ...] = ()
    end: tuple[float, float] | None = None  # a further value, drawn as a larger mark
    beside: tuple[tuple[float, float], ...] = ()  # a second curve of the same series, dotted
    width: float = 1.8


@dataclass(frozen=True)
class Plane:
    """Two axes. x_unit and y_unit with what they show; from_zero: the axis starts at 0."""

    title: str
    x_name: str
    y_name: str
    x_unit: AxisUnit
    y_unit: AxisUnit
    legend: tuple[LegendEntry, ...] = ()
    x_from_zero: bool = False
    y_from_zero: bool = False
    level: float | None = None  # a line to compare with
    x_marks: tuple[tuple[float, str], ...] = ()  # ticks in place of round numbers, with their texts
    front: tuple[tuple[float, float], ...] = field(default=())  # corners of a line, from left to right


def scatter(plane: Plane, dots: Sequence[Dot]) -> Picture:
    """The points on the plane. Names are left out where they would cover something."""
    spread = [end for dot in dots if dot.spread and len(dots) <= MOST_RANGES for end in dot.spread]
    shapes, xs, ys, bottom = _plane(plane, [dot.x for dot in dots], [dot.y for dot in dots] + spread)
    if len(plane.front) > 1:
        shapes.append(Stroke(tuple((xs.at(x), ys.at(y)) for x, y in plane.front), "ink", 1.4, (5, 3)))
    boxes = [(xs.at(dot.x) - 5, ys.at(dot.y) - 5, xs.at(dot.x) + 5, ys.at(dot.y) + 5) for dot in dots]
    for dot in dots:
        if dot.spread and len(dots) <= MOST_RANGES:
            low, high = map(ys.at, dot.spread)
            shapes += whisker((xs.at(dot.x), low), (xs.at(dot.x), high), dot.style.colour, dot.key)
    for dot in dots:
        shapes.append(Marker(xs.at(dot.x), ys.at(dot.y), dot.style.marker, dot.style.colour, 5, dot.key, dot.tip))
    for dot in dots:
        if dot.name:
            shapes += _named(dot, xs.at(dot.x), ys.at(dot.y), boxes, ys.end_px)
    return Picture(plane.title, WIDTH, bottom + AXIS_HEIGHT, tuple(shapes))


def _named(dot: Dot, x: float, y: float, boxes: list[tuple[float, float, float, float]], top: float) -> list[Shape]:
    """The name next to its point, at the first of six places that covers nothing; none if there is no such place."""
    text = shortened(dot.name, NAME_LETTERS)
    width = text_width(text, SMALL_PX)
    for right, down in ((9, 4), (-9 - width, 4), (-width / 2, -10), (-width / 2, 18), (9, -8), (9, 16)):
        box = (x + right, y + down - 10, x + right + width, y + down + 3)
        inside = box[0] >= LEFT and box[2] <= RIGHT and box[1] >= top
        if inside and not any(_overlap(box, other) for other in boxes):
            boxes.append(box)
            return [Label(x + right, y + down, text, SMALL_PX, key=dot.key)]
    return []


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def curves(plane: Plane, lines: Sequence[LineSeries]) -> Picture:
    """The curves on the plane."""
    points = [point for line in lines for point in (*line.points, *line.beside, *([line.end] if line.end else []))]
    spread = [end for line in lines for pair in line.spreads for end in pair]
    levels = [plane.level] if plane.level is not None else []
    shapes, xs, ys, bottom = _plane(plane, [x for x, _ in points], [y for _, y in points] + spread + levels)
    for line in lines:
        drawn = tuple((xs.at(x), ys.at(y)) for x, y in line.points)
        style = line.style
        if len(drawn) > 1:
            shapes.append(Stroke(drawn, style.colour, line.width, style.dash, line.key, line.name))
        if len(line.beside) > 1:
            dotted = tuple((xs.at(x), ys.at(y)) for x, y in line.beside)
            shapes.append(Stroke(dotted, style.colour, line.width, (1.5, 3), line.key, line.name))
        for (x, _), (low, high) in zip(line.points, line.spreads, strict=False):
            shapes += whisker((xs.at(x), ys.at(low)), (xs.at(x), ys.at(high)), style.colour, line.key)
        if len(drawn) <= MOST_MARKS and len(lines) <= MOST_MARKS:
            shapes += [Marker(x, y, style.marker, style.colour, 3, line.key) for x, y in drawn]
        if line.end:
            x, y = line.end
            shapes.append(Marker(xs.at(x), ys.at(y), style.marker, style.colour, 6, line.key, line.name))
    return Picture(plane.title, WIDTH, bottom + AXIS_HEIGHT, tuple(shapes))


def _plane(plane: Plane, xs: list[float], ys: list[float]) -> tuple[list[Shape], Scale, Scale, float]:
    shapes, top = head(plane.title, plane.legend)
    bottom = top + HEIGHT
    x_scale = Scale(*padded_range(xs, from_zero=plane.x_from_zero), LEFT, RIGHT)
    y_scale = Scale(*padded_range(ys, from_zero=plane.y_from_zero), bottom, top + 6)
    shapes += axis_left(y_scale, plane.y_unit, plane.y_name, LEFT, RIGHT)
    shapes += axis_below(x_scale, plane.x_unit, plane.x_name, top, bottom, marks=plane.x_marks)
    if plane.level is not None:
        y = y_scale.at(plane.level)
        shapes.append(Stroke(((LEFT, y), (RIGHT, y)), "muted", 1.4, (6, 3)))
    return shapes, x_scale, y_scale, bottom
