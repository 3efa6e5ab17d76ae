"""Draws points in two dimensions, with ranges, a front and names; and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.wings.page.charts import canvas
from orchestrator.wings.page.charts.canvas import Picture
from orchestrator.wings.page.charts.palette import LIGHT, SeriesStyle

HEIGHT = 330.0
NAME_LETTERS = 32
MOST_MARKS = 40  # of a curve; with more, its line alone is drawn
MOST_RANGES = 60


@dataclass(frozen=True)
class Dot:
    """A point of a scatter picture. spread: the range of y. name: written next to it."""

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
    x_marks: tuple[tuple[float, str], ...] = ()  # ticks in place of round numbers, with their texts
    y_marks: tuple[tuple[float, str], ...] = ()
    front: tuple[tuple[float, float], ...] = field(default=())  # corners of a line, from left to right


def scatter(plane: Plane, dots: Sequence[Dot]) -> Picture:
    """The points on the plane."""
    ranged = [dot for dot in dots if dot.spread and len(dots) <= MOST_RANGES]
    spread = [end for dot in ranged for end in dot.spread or ()]
    picture = _plane(plane, [dot.x for dot in dots], [dot.y for dot in dots] + spread)
    if len(plane.front) > 1:
        _curve(picture, plane.front, color=LIGHT["ink"], linewidth=1.4, linestyle=(0, (3.6, 2.1)))
    for dot in ranged:
        low, high = ((dot.x, end) for end in dot.spread or ())
        picture.mark(canvas.whisker(picture.axes, low, high, dot.style.colour), dot.key)
    named = []
    for dot in dots:
        look = {"linestyle": "none", **canvas.marker_style(dot.style, 5)}
        picture.mark(_curve(picture, [(dot.x, dot.y)], zorder=4, **look), dot.key, dot.tip)
        if dot.name:
            named.append(picture.name((dot.x, dot.y), canvas.shortened(dot.name, NAME_LETTERS)))
            picture.mark(named[-1], dot.key)
    canvas.hide_covered(picture, named)
    return picture


def curves(plane: Plane, lines: Sequence[LineSeries]) -> Picture:
    """The curves on the plane."""
    points = [point for line in lines for point in (*line.points, *line.beside, *([line.end] if line.end else []))]
    spread = [end for line in lines for pair in line.spreads for end in pair]
    levels = [plane.level] if plane.level is not None else []
    picture = _plane(plane, [x for x, _ in points], [y for _, y in points] + spread + levels)
    for line in lines:
        look = canvas.line_style(line.style, line.width)
        if len(line.points) <= MOST_MARKS and len(lines) <= MOST_MARKS:
            look |= canvas.marker_style(line.style, 3)
        picture.mark(_curve(picture, line.points, **look), line.key, line.name)
        if len(line.beside) > 1:
            dotted = {**canvas.line_style(line.style, line.width), "linestyle": (0, (0.8, 1.7))}
            picture.mark(_curve(picture, line.beside, **dotted), line.key, line.name)
        for (x, _), (low, high) in zip(line.points, line.spreads, strict=False):
            picture.mark(canvas.whisker(picture.axes, (x, low), (x, high), line.style.colour), line.key)
        if line.end:
            end = {"linestyle": "none", "zorder": 4, **canvas.marker_style(line.style, 6)}
            picture.mark(_curve(picture, [line.end], **end), line.key, line.name)
    return picture


def _curve(picture: Picture, points: Sequence[tuple[float, float]], **look: Any) -> Any:
    (line,) = picture.axes.plot(*zip(*points, strict=True), clip_on=False, **look)
    return line


def _plane(plane: Plane, xs: Sequence[float], ys: Sequence[float]) -> Picture:
    picture = canvas.blank(plane.title, plane.legend, HEIGHT)
    axes = picture.axes
    axes.set(xlim=padded_range(xs), ylim=padded_range(ys, from_zero=plane.y_from_zero))
    canvas.numbers(axes, "y", plane.y_unit, plane.y_name)
    canvas.numbers(axes, "x", plane.x_unit, plane.x_name)
    if plane.x_marks:
        axes.set_xticks(*zip(*plane.x_marks, strict=True))
    if plane.y_marks:
        axes.set_yticks(*zip(*plane.y_marks, strict=True))
    if plane.level is not None:
        axes.axhline(plane.level, color=LIGHT["muted"], linewidth=1.4, linestyle=(0, (4.3, 2.1)))
    return picture


def padded_range(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """A range that holds all values with some room, and is not empty."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (0.0 if from_zero and low >= 0 else low - room), high + room
