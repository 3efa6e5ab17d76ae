"""Colours of the pictures: those of Okabe and Ito, which colour-blind people can tell apart, and signs for grey prints.

[Note: told apart in grey]
Some of these colours are equally light, so a paint is a colour and a hatch, and a series is a colour, a marker and a
dash: any two paints differ in their hatch or by at least 15 units of lightness (CIE L*), any two series in both their
marker and their dash.
"""

from __future__ import annotations

from typing import NamedTuple

OKABE_ITO = {
    "blue": "#0072b2",
    "sky": "#56b4e9",
    "vermilion": "#d55e00",
    "orange": "#e69f00",
    "green": "#009e73",
    "yellow": "#f0e442",
    "purple": "#cc79a7",
}
# "paper" is the background, "ink" text and outlines, "muted" notes, "grid" lines behind the data.
LIGHT = {**OKABE_ITO, "ink": "#1b1f24", "muted": "#57606a", "grid": "#d8dee4", "paper": "#ffffff", "grey": "#8c959f"}
# The darkest colour is lighter on a dark background, where it would be hard to see.
DARK = {**LIGHT, "ink": "#e6edf3", "muted": "#9da7b3", "grid": "#343b44", "paper": "#14181d", "blue": "#2b8fd0"}


class Paint(NamedTuple):
    """What fills an area. hatch: of matplotlib; empty for a plain area."""

    colour: str
    hatch: str = ""


class SeriesStyle(NamedTuple):
    """How one of several series is drawn. marker: of canvas.MARKERS. dash: lengths in pixels, if any."""

    colour: str
    marker: str
    dash: tuple[float, ...] = ()


PAINTS = (
    Paint("blue"),
    Paint("sky"),
    Paint("vermilion", "/"),
    Paint("yellow"),
    Paint("green", "\\"),
    Paint("orange", "."),
    Paint("purple", "x"),
    Paint("grey", "-"),
)
BEST, OTHERS, UNRANKED, APART = Paint("blue"), Paint("sky"), Paint("sky", "/"), Paint("grey", "-")
SERIES = (
    SeriesStyle("blue", "circle"),
    SeriesStyle("vermilion", "square", (7, 3)),
    SeriesStyle("green", "triangle", (2, 2)),
    SeriesStyle("orange", "diamond", (9, 3, 2, 3)),
    SeriesStyle("purple", "down", (4, 4)),
    SeriesStyle("sky", "cross", (12, 4)),
)
