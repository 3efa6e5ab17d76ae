"""Draws points in two dimensions, with ranges, a front and names; and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.wings.page.charts import canvas
from orchestrator.wings.page.charts.canvas import SMALL_PX, WIDTH, Picture, text_width
from orchestrator.wings.page.charts.palette import LIGHT, SeriesStyle

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
    """Two axes. x_unit and y_unit with what they show; y_from_zero: that axis starts at 0."""

    title: str
    x_name: str
    y_name: str
    x_unit: canvas.AxisUnit
    y_unit: canvas.AxisUnit
    legend: tuple[canvas.LegendEntry, ...] = ()
    y_from_zero: bool = False
    level: float | None = None  # a line to compare with
    x_marks: tuple[tuple[float, str], ...] = ()  # ticks in place of round canvas.numbers, with their texts
    front: tuple[tuple[float, float], ...] = field(default=())  # corners of a line, from left to right


def scatter(plane: Plane, dots: Sequence[Dot]) -> Picture:
    """The points on the plane. Names are left out where they would cover something."""
    ranged = [dot for dot in dots if dot.spread and len(dots) <= MOST_RANGES]
    spread = [end for dot in ranged for end in dot.spread or ()]
    picture, axes = _plane(plane, [dot.x for dot in dots], [dot.y for dot in dots] + spread)
    if len(plane.front) > 1:
        _curve(plane, axes, plane.front, color=LIGHT["ink"], linewidth=1.4, linestyle=(0, (3.6, 2.1)))
    for dot in ranged:
        ends = [(dot.x / plane.x_unit.divisor, end / plane.y_unit.divisor) for end in dot.spread or ()]
        picture.mark(canvas.whisker(axes, ends[0], ends[1], dot.style.colour), dot.key)
    for dot in dots:
        look = {"linestyle": "none", **canvas.marker_style(dot.style, 5)}
        picture.mark(_curve(plane, axes, [(dot.x, dot.y)], zorder=4, **look), dot.key, dot.tip)
    places = [
        axes.transData.transform((dot.x / plane.x_unit.divisor, dot.y / plane.y_unit.divisor)).tolist() for dot in dots
    ]
    boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for dot, (x, y) in zip(dots, places, strict=True):
        if dot.name:
            _name(picture, dot, (x, y), boxes)
    return picture


Box = tuple[float, float, float, float]


def _name(picture: Picture, dot: Dot, at: tuple[float, float], boxes: list[Box]) -> None:
    """The name next to its point, at the first of six places that covers nothing; none if there is no such place."""
    text = canvas.shortened(dot.name, NAME_LETTERS)
    width, (x, y) = text_width(text, SMALL_PX), at
    top = picture.figure.axes[-1].bbox.y1
    for right, up in ((9, -4), (-9 - width, -4), (-width / 2, 10), (-width / 2, -18), (9, 8), (9, -16)):
        box = (x + right, y + up - 3, x + right + width, y + up + 10)
        inside = box[0] >= LEFT and box[2] <= RIGHT and box[3] <= top
        if inside and not any(_overlap(box, other) for other in boxes):
            boxes.append(box)
            picture.mark(picture.text(x + right, picture.height - y - up, text), dot.key)
            return


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def curves(plane: Plane, lines: Sequence[LineSeries]) -> Picture:
    """The curves on the plane."""
    points = [point for line in lines for point in (*line.points, *line.beside, *([line.end] if line.end else []))]
    spread = [end for line in lines for pair in line.spreads for end in pair]
    levels = [plane.level] if plane.level is not None else []
    picture, axes = _plane(plane, [x for x, _ in points], [y for _, y in points] + spread + levels)
    for line in lines:
        look = canvas.line_style(line.style, line.width)
        if len(line.points) <= MOST_MARKS and len(lines) <= MOST_MARKS:
            look |= canvas.marker_style(line.style, 3)
        picture.mark(_curve(plane, axes, line.points, **look), line.key, line.name)
        if len(line.beside) > 1:
            dotted = {**canvas.line_style(line.style, line.width), "linestyle": (0, (0.8, 1.7))}
            picture.mark(_curve(plane, axes, line.beside, **dotted), line.key, line.name)
        for (x, _), ends in zip(line.points, line.spreads, strict=False):
            low, high = ((x / plane.x_unit.divisor, end / plane.y_unit.divisor) for end in ends)
            picture.mark(canvas.whisker(axes, low, high, line.style.colour), line.key)
        if line.end:
            end = {"linestyle": "none", "zorder": 4, **canvas.marker_style(line.style, 6)}
            picture.mark(_curve(plane, axes, [line.end], **end), line.key, line.name)
    return picture


def _curve(plane: Plane, axes: Any, points: Sequence[tuple[float, float]], **look: Any) -> Any:
    xs, ys = (
        [value / unit.divisor for value in values]
        for values, unit in zip(zip(*points, strict=True), (plane.x_unit, plane.y_unit), strict=True)
    )
    (line,) = axes.plot(xs, ys, clip_on=False, **look)
    return line


def _plane(plane: Plane, xs: Sequence[float], ys: Sequence[float]) -> tuple[Picture, Any]:
    picture, top = canvas.blank(plane.title, plane.legend, HEIGHT)
    axes = picture.axes(LEFT, RIGHT, top + 6, top + HEIGHT)
    axes.set_xlim(*(end / plane.x_unit.divisor for end in padded_range(xs)))
    axes.set_ylim(*(end / plane.y_unit.divisor for end in padded_range(ys, from_zero=plane.y_from_zero)))
    canvas.numbers(axes, "y", plane.y_unit.named(plane.y_name))
    canvas.numbers(axes, "x", plane.x_unit.named(plane.x_name))
    if plane.x_marks:
        axes.set_xticks(*zip(*plane.x_marks, strict=True))
    if plane.level is not None:
        look = {"color": LIGHT["muted"], "linewidth": 1.4, "linestyle": (0, (4.3, 2.1))}
        axes.axhline(plane.level / plane.y_unit.divisor, **look)
    return picture, axes


def padded_range(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """A range that holds all values with some room, and is not empty."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (0.0 if from_zero and low >= 0 else low - room), high + room
