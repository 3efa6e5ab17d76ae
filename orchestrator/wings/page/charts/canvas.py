"""A picture of the report: one figure of matplotlib in pixels, saved as SVG and as PNG alike.

[Note: what is kept on top of matplotlib]
A page highlights the marks of a row of its table, has texts for the mouse, and a light and a dark theme. An artist with
a key or a tip gets an id that says its number; in the SVG that becomes `data-row` and a <title>. Colours are those of
the light theme, and become CSS variables. matplotlib is slow to import, so it is imported when something is drawn.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from orchestrator.wings.page.charts.palette import DARK, LIGHT, Paint, SeriesStyle

WIDTH = 760.0
TITLE_AXIS_PX, LEGEND_ROW_PX = 72.0, 17.0  # heights of a title with an axis' numbers and name, and of a row of names
FONT_PX, SMALL_PX, TITLE_PX = 12, 11, 14
LETTER_PX, SIGN_PX = 7.0, 52.0  # in a legend, about: the width of a letter, and of a sign with its margins
DPI = 72  # of an SVG of matplotlib: a point is a pixel
DASHED = "dashed"
HATCH_DENSITY = 3
FONT = "system-ui, 'DejaVu Sans', Verdana, sans-serif"
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": SMALL_PX,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",
    "path.simplify": False,
}
MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v", "cross": "x"}


class AxisUnit(NamedTuple):
    """The unit of an axis. divisor: the number of base units in one of it."""

    name: str
    divisor: float = 1.0

    def named(self, what: str) -> str:
        """The text of an axis: "memory of a rank [GiB]", or what there is of both."""
        return f"{what} [{self.name}]" if what and self.name else what or self.name


def size_unit(largest_bytes: float) -> AxisUnit:
    """The unit in which sizes of up to this many bytes are short numbers; 1 GiB = 2^30 bytes."""
    for name, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest_bytes >= divisor:
            return AxisUnit(name, divisor)
    return AxisUnit("bytes")


class LegendEntry(NamedTuple):
    """A name and its sign: an area's paint, a series' style, DASHED for a dashed outline, or the colour of a line.
    with_line: a series' line is shown with its marker."""

    name: str
    sign: Paint | SeriesStyle | str
    with_line: bool = True


@dataclass
class Picture:
    """A figure of matplotlib with one pair of axes. marks: the key and the tip of each marked artist. drawn: its shapes
    as SVG, once they are needed."""

    title: str
    width: float
    height: float
    figure: Any
    axes: Any
    marks: list[tuple[int | None, str]] = field(default_factory=list)
    drawn: str = ""

    def mark(self, artist: Any, key: int | None = None, tip: str = "") -> None:
        """The artist shows this row of the table; tip: text for the mouse."""
        artist.set_gid(f"mark-{len(self.marks)}")
        self.marks.append((key, tip))

    def text(self, x: float, y: float, text: str, **more: Any) -> Any:
        """A text at this place of the axes."""
        return self.axes.text(x, y, text, **{"color": LIGHT["ink"], "parse_math": False, **more})

    def name(self, point: tuple[float, float], text: str) -> Any:
        """A text next to this point, towards the middle of the axes, so that it stays inside."""
        side, right = ("left", 8) if point[0] <= sum(self.axes.get_xlim()) / 2 else ("right", -8)
        behind = {"facecolor": LIGHT["paper"], "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
        look = {"ha": side, "color": LIGHT["ink"], "parse_math": False, "bbox": behind}
        return self.axes.annotate(text, point, xytext=(right, 6), textcoords="offset points", **look)


def blank(title: str, legend: Sequence[LegendEntry], height: float) -> Picture:
    """A picture of its title and legend, whose axes have about this height, and neither a frame nor numbers."""
    # On a new machine it says that it lists the fonts, and without a home that its cache is temporary: to nobody's use.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    longest = max((len(entry.name) for entry in legend), default=1)
    columns = max(1, int(WIDTH // (longest * LETTER_PX + SIGN_PX)))
    whole = TITLE_AXIS_PX + LEGEND_ROW_PX * -(-len(legend) // columns) + height
    figure = Figure(figsize=(WIDTH / DPI, whole / DPI), dpi=DPI, layout="constrained")
    figure.patch.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE_PX, fontweight="bold", parse_math=False)
    if legend:
        look = {"fontsize": SMALL_PX, "frameon": False, "labelcolor": LIGHT["ink"], "handlelength": 2.2}
        rows = [
            entry for column in range(columns) for entry in legend[column::columns]
        ]  # it fills columns, we read rows
        signs, names = [_sign(entry) for entry in rows], [entry.name for entry in rows]
        drawn = figure.legend(signs, names, loc="outside lower left", ncols=columns, **look)
        for text in drawn.get_texts():
            text.set_parse_math(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    axes.tick_params(labelsize=SMALL_PX, labelcolor=LIGHT["muted"], pad=6)
    return Picture(title, WIDTH, whole, figure, axes)


def _sign(entry: LegendEntry) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    sign = entry.sign
    if isinstance(sign, SeriesStyle):
        line = line_style(sign) if entry.with_line else {"linestyle": "none"}
        return Line2D([], [], **line, **marker_style(sign, 4))
    if isinstance(sign, Paint) or sign == DASHED:
        return Patch(**(paint_style(sign) if isinstance(sign, Paint) else DASHED_STYLE))
    return Line2D([], [], color=LIGHT[sign], linewidth=2)


# ---- how things look ------------------------------------------------------------------------------------------------

DASHED_STYLE: dict[str, Any] = {"fill": False, "edgecolor": LIGHT["ink"], "linestyle": (0, (4, 2)), "linewidth": 1}


def paint_style(paint: Paint) -> dict[str, Any]:
    """Arguments of an area."""
    hatch = {"hatch": paint.hatch * HATCH_DENSITY} if paint.hatch else {}
    return {"facecolor": LIGHT[paint.colour], "edgecolor": LIGHT["ink"], "linewidth": 0, **hatch}


def line_style(style: SeriesStyle, width: float = 1.8) -> dict[str, Any]:
    """Arguments of a line. matplotlib counts the lengths of dashes in widths of the line."""
    dash = (0, tuple(length / width for length in style.dash)) if style.dash else "-"
    return {"color": LIGHT[style.colour], "linewidth": width, "linestyle": dash}


def marker_style(style: SeriesStyle, radius: float) -> dict[str, Any]:
    """Arguments of a line's marks. A cross has no area, so its lines have the colour."""
    is_cross = style.marker == "cross"
    edge = LIGHT[style.colour] if is_cross else LIGHT["paper"]
    return {
        "marker": MARKERS[style.marker],
        "markersize": (1.7 if style.marker in ("square", "diamond") else 2) * radius,
        "markerfacecolor": LIGHT[style.colour],
        "markeredgecolor": edge,
        "markeredgewidth": 2 if is_cross else 0.8,
    }


def whisker(axes: Any, low: tuple[float, float], high: tuple[float, float], colour: str) -> Any:
    """A line between two points, with a cap at each end."""
    marker = "|" if low[1] == high[1] else "_"
    (line,) = axes.plot(
        *zip(low, high, strict=True), color=LIGHT[colour], linewidth=1.3, marker=marker, markersize=6, clip_on=False
    )
    return line


def numbers(axes: Any, which: str, unit: AxisUnit, name: str) -> None:
    """Round numbers of the unit with lines through the axes on the "x" or the "y" axis, whose range is set, and its
    name."""
    from matplotlib.ticker import MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    rounds = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low / unit.divisor, high / unit.divisor)
    shown = [value for value in rounds if low <= value * unit.divisor <= high]
    axis.set_ticks([value * unit.divisor for value in shown], [f"{value:,.10g}" for value in shown])
    axes.grid(axis=which, color=LIGHT["grid"], linewidth=1)
    side = "bottom" if which == "x" else "left"
    axes.spines[side].set_visible(True)
    axes.spines[side].set_color(LIGHT["muted"])
    axes.tick_params(axis=which, **{f"label{side}": True})
    axis.set_label_text(unit.named(name), color=LIGHT["ink"], fontsize=SMALL_PX)


def shortened(text: str, most: int) -> str:
    """The text, with "…" in place of its middle if it is longer than `most` letters: both ends of a label tell."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def hide_covered(picture: Picture, texts: Sequence[Any]) -> None:
    """Leaves out each of these texts that would lie on one before it."""
    with _style():
        picture.figure.draw_without_rendering()
    shown: list[Any] = []
    for text in texts:
        box = text.get_window_extent()
        text.set_visible(not any(box.overlaps(other) for other in shown))
        shown += [box] if text.get_visible() else []


@contextmanager
def _style(more: Mapping[Any, Any] | None = None) -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context({**STYLE, **(more or {})}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that its own font lacks: a browser has another
        yield


# ---- files ----------------------------------------------------------------------------------------------------------


def variables(colours: dict[str, str]) -> str:
    """The CSS variables of a theme, for the inside of a rule."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def document(picture: Picture) -> str:
    """A file of its own, with a background, light or dark as the viewer prefers."""
    style = f":root{{{variables(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    background = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    return inline(picture, f"<style>{style}</style>{background}") + "\n"


def inline(picture: Picture, head: str = "") -> str:
    """A part of a page that has the variables. See [Note: what is kept on top of matplotlib]."""
    picture.drawn = picture.drawn or _shapes(picture)
    size = f'width="{picture.width:.0f}" height="{picture.height:.0f}"'
    box = f'viewBox="0 0 {picture.width:.0f} {picture.height:.0f}"'
    look = f'role="img" aria-label="{escape(picture.title)}" font-family="{FONT}" stroke-linejoin="round"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} {look}>{head}\n{picture.drawn}'


def _shapes(picture: Picture) -> str:
    """What matplotlib writes, from its first definitions to the end, in the words of a page and no longer than needed:
    a decimal is finer than a screen, and the font and the joins of lines are those of the whole picture."""
    file = io.StringIO()
    with _style({"svg.hashsalt": picture.title}):
        picture.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    text = re.sub(r'<style type="text/css">.*?</style>', "", text[text.index("<defs>") :], flags=re.DOTALL)
    text = re.sub(r"<[^<>]+>", lambda found: _tag(picture, found[0]), text)
    return re.sub(r"\s*\n\s*", " ", text).replace("> <", ">\n<").strip()


def _tag(picture: Picture, tag: str) -> str:
    """One tag of matplotlib's; texts between tags stay as they are."""
    if tag.startswith('<g id="'):
        return "" if tag.endswith("/>") else _group(picture, tag)
    for name, colour in LIGHT.items():
        tag = tag.replace(colour, f"var(--{name})")
    tag = re.sub(r"font-family: [^;]*; ", "", tag)
    tag = re.sub(r"(font: [^;']*px) [^;]*", rf"\1 {FONT}", tag)  # as matplotlib before 3.10 has it
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag.replace("xlink:href", "href"))
    return re.sub(r"\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), tag)


def _group(picture: Picture, tag: str) -> str:
    """The start of an artist's group. What has a tip and no colour has to take the mouse all the same."""
    number = re.fullmatch(r'<g id="mark-(\d+)">', tag)
    key, tip = picture.marks[int(number[1])] if number else (None, "")
    row = "" if key is None else f' data-row="{key}"'
    return f'<g{row} pointer-events="all"><title>{escape(tip, quote=False)}</title>' if tip else f"<g{row}>"


def png(pictures: Sequence[Picture], factor: float = 1.0, columns: int = 2, gap: int = 24) -> bytes:
    """All pictures in the light theme, in columns: each goes below the shortest column so far. factor: pixels of the
    file for one of a picture."""
    from PIL import Image

    placed, ends = [], [round(gap * factor)] * columns
    for picture in pictures:
        file = io.BytesIO()
        with _style():
            picture.figure.savefig(file, format="png", dpi=DPI * factor)
        image = Image.open(file)
        column = ends.index(min(ends))
        placed.append((image, (round((gap + column * (WIDTH + gap)) * factor), ends[column])))
        ends[column] += image.height + round(gap * factor)
    used = min(columns, max(1, len(pictures)))
    sheet = Image.new("RGB", (round((gap + used * (WIDTH + gap)) * factor), max(ends)), "white")
    for image, place in placed:
        sheet.paste(image, place, image)  # through its own transparency
    file = io.BytesIO()
    sheet.save(file, "png")
    return file.getvalue()
