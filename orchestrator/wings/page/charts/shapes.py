"""The shapes that a picture is made of, in pixels from its upper left corner. Colours are names of the palette."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.wings.page.charts.palette import Paint

FONT_PX, SMALL_PX, TITLE_PX = 12, 11, 14
# Widths of letters are not known before a browser draws them. This is more than the mean of the common sans-serif
# fonts, so that what is placed after a text stays clear of it.
LETTER = 0.6


class Area(NamedTuple):
    """A rectangle. paint: None for an outline alone. dashed: of the outline. key: the number of the row that it shows.
    tip: text for the mouse."""

    x: float
    y: float
    width: float
    height: float
    paint: Paint | None = None
    outline: str = ""
    dashed: bool = False
    key: int | None = None
    tip: str = ""


class FilledOutline(NamedTuple):
    """An area with any outline. points: its corners in turn."""

    points: tuple[tuple[float, float], ...]
    paint: Paint
    outline: str = ""
    key: int | None = None
    tip: str = ""


class Stroke(NamedTuple):
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str = "ink"
    width: float = 1.0
    dash: tuple[float, ...] = ()
    key: int | None = None
    tip: str = ""


class Marker(NamedTuple):
    """A small sign at a point. kind: one of palette.MARKERS. radius in pixels."""

    x: float
    y: float
    kind: str
    colour: str
    radius: float = 4.5
    key: int | None = None
    tip: str = ""


class Label(NamedTuple):
    """A line of text. x and y: of its baseline, at its start, middle or end, as `anchor` says. turned: it reads
    upwards."""

    x: float
    y: float
    text: str
    size_px: float = FONT_PX
    colour: str = "ink"
    anchor: str = "start"
    bold: bool = False
    turned: bool = False
    key: int | None = None
    tip: str = ""


Shape = Area | FilledOutline | Stroke | Marker | Label


@dataclass(frozen=True)
class Picture:
    """A drawing. title: also its text for people who do not see it."""

    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]


def text_width(text: str, size_px: float = FONT_PX) -> float:
    """An upper estimate of the width of a text in pixels."""
    return len(text) * size_px * LETTER


def shortened(text: str, most: int) -> str:
    """The text, with "…" in place of its middle if it is longer than `most` letters: both ends of a label tell."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def moved(shape: Shape, right: float, down: float) -> Shape:
    """The shape at another place."""
    if isinstance(shape, Stroke | FilledOutline):
        return shape._replace(points=tuple((x + right, y + down) for x, y in shape.points))
    return shape._replace(x=shape.x + right, y=shape.y + down)


def tiled(title: str, pictures: Sequence[Picture], columns: int, gap: float = 24) -> Picture:
    """All pictures in one, below each other in columns: each goes below the shortest column so far."""
    width = max((picture.width for picture in pictures), default=0.0)
    ends = [gap] * columns
    shapes: list[Shape] = []
    for picture in pictures:
        column = min(range(columns), key=lambda at: ends[at])
        right = gap + column * (width + gap)
        shapes += [moved(shape, right, ends[column]) for shape in picture.shapes]
        ends[column] += picture.height + gap
    used = min(columns, max(1, len(pictures)))
    return Picture(title, gap + used * (width + gap), max(ends), tuple(shapes))
