"""The pixels of a picture as PNG. The only file that imports matplotlib, which is slow to import."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from orchestrator.wings.page.charts.palette import LIGHT
from orchestrator.wings.page.charts.shapes import Area, FilledOutline, Label, Marker, Picture, Shape, Stroke
from orchestrator.wings.page.charts.svg import outline_of

DPI = 100
POINTS_PER_PX = 72 / DPI
HATCH_DENSITY = 4
HATCH_COLOUR = (0.1, 0.12, 0.14, 0.55)
ANCHORS: dict[str, Any] = {"start": "left", "middle": "center", "end": "right"}
PLAIN: dict[Any, Any] = {"hatch.linewidth": 0.6, "font.family": ["DejaVu Sans"]}


def png(picture: Picture, factor: float = 1.0) -> bytes:
    """The picture in the light theme. factor: pixels of the file for one of the picture.

    ImportError if matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(PLAIN):
        figure = Figure(figsize=(picture.width / DPI, picture.height / DPI), dpi=DPI * factor)
        canvas: Any = FigureCanvasAgg(figure)
        figure.patch.set_facecolor(LIGHT["paper"])
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
        axes.axis("off")
        for order, shape in enumerate(picture.shapes):  # matplotlib itself draws lines over areas, and text over both
            for artist in _artists(shape):
                artist.set_zorder(order)
                axes.add_artist(artist)
        file = io.BytesIO()
        canvas.print_png(file, metadata={"Title": picture.title, "Software": None})
    return file.getvalue()


def _artists(shape: Shape) -> list[Any]:
    if isinstance(shape, Area):
        return _area(shape)
    if isinstance(shape, FilledOutline):
        return _region(shape)
    if isinstance(shape, Stroke):
        return [_line(shape.points, shape.colour, shape.width, shape.dash)]
    return _marker(shape) if isinstance(shape, Marker) else [_label(shape)]


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, dash: Sequence[float] = ()) -> Any:
    from matplotlib.lines import Line2D

    xs, ys = zip(*points, strict=True)
    # matplotlib counts the lengths of dashes in widths of the line.
    dashes = tuple(length / width for length in dash) or (None, None)
    return Line2D(xs, ys, color=LIGHT[colour], linewidth=width * POINTS_PER_PX, dashes=dashes)


def _area(area: Area) -> list[Any]:
    from matplotlib.patches import Rectangle

    place, paint = ((area.x, area.y), area.width, area.height), area.paint
    if paint is None and not area.outline:
        return []
    filled = Rectangle(
        *place,
        facecolor=LIGHT[paint.colour] if paint else "none",
        edgecolor=LIGHT[area.outline] if area.outline else "none",
        linewidth=POINTS_PER_PX,
        linestyle=(0, (4, 2)) if area.dashed else "-",
    )
    if not paint or not paint.hatch:
        return [filled]
    hatch = paint.hatch * HATCH_DENSITY
    return [filled, Rectangle(*place, fill=False, hatch=hatch, edgecolor=HATCH_COLOUR, linewidth=0)]


def _region(region: FilledOutline) -> list[Any]:
    from matplotlib.patches import Polygon

    edge = LIGHT[region.outline] if region.outline else "none"
    filled = Polygon(region.points, facecolor=LIGHT[region.paint.colour], edgecolor=edge, linewidth=0.5)
    if not region.paint.hatch:
        return [filled]
    hatch = region.paint.hatch * HATCH_DENSITY
    return [filled, Polygon(region.points, fill=False, hatch=hatch, edgecolor=HATCH_COLOUR, linewidth=0)]


def _marker(marker: Marker) -> list[Any]:
    from matplotlib.patches import Circle, Polygon

    if marker.kind == "cross":
        corners = outline_of(marker)
        return [_line(ends, marker.colour, 2) for ends in (corners[:2], corners[2:])]
    drawn: dict[str, Any] = {"facecolor": LIGHT[marker.colour], "edgecolor": LIGHT["paper"], "linewidth": 0.7}
    if marker.kind == "circle":
        return [Circle((marker.x, marker.y), marker.radius, **drawn)]
    return [Polygon(outline_of(marker), **drawn)]


def _label(label: Label) -> Any:
    from matplotlib.text import Text

    return Text(
        label.x,
        label.y,
        label.text,
        fontsize=label.size_px * POINTS_PER_PX,
        color=LIGHT[label.colour],
        horizontalalignment=ANCHORS[label.anchor],
        verticalalignment="baseline",
        rotation=90 if label.turned else 0,
        rotation_mode="anchor",
        fontweight="bold" if label.bold else "normal",
        parse_math=False,
    )
