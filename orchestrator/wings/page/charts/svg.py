"""The text of a picture as SVG, whose colours are CSS variables: it follows the light or dark theme of its page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from orchestrator.wings.page.charts.palette import DARK, HATCHES, LIGHT
from orchestrator.wings.page.charts.shapes import Area, FilledOutline, Label, Marker, Picture, Shape, Stroke

FONT = "system-ui, 'DejaVu Sans', Verdana, sans-serif"
HATCH_NAMES = dict(zip(HATCHES, ("rising", "falling", "dots", "crossed", "level"), strict=True))
_HATCH_PATHS = {
    "rising": "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2",
    "falling": "M-1,5 l2,2 M0,0 l6,6 M5,-1 l2,2",
    "dots": "M1.5,1.5 h1.4 M4.5,4.5 h1.4",
    "crossed": "M0,0 l6,6 M0,6 l6,-6",
    "level": "M0,3 h6",
}
# Corners of the marks other than the circle, for a radius of 1, with a factor that makes them look equally large.
_CORNERS = {
    "square": (0.86, ((-1, -1), (1, -1), (1, 1), (-1, 1))),
    "triangle": (1.12, ((0, -1), (1, 0.8), (-1, 0.8))),
    "diamond": (1.2, ((0, -1), (1, 0), (0, 1), (-1, 0))),
    "down": (1.12, ((0, 1), (1, -0.8), (-1, -0.8))),
    "cross": (1.0, ((-1, -1), (1, 1), (-1, 1), (1, -1))),
}


def variables(colours: Mapping[str, str]) -> str:
    """The CSS variables of a theme, for the inside of a rule."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def classes() -> str:
    """The CSS rules that every picture needs, without the variables of a theme."""
    rules = [f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in LIGHT]
    return "".join(rules) + f".hatch path{{stroke:var(--ink);stroke-width:1;fill:none}}svg text{{font-family:{FONT}}}"


def hatches() -> str:
    """The definitions of the hatches, needed once in a document."""
    patterns = [
        f'<pattern id="h-{name}" class="hatch" width="6" height="6" patternUnits="userSpaceOnUse"><path d="{path}"/>'
        "</pattern>"
        for name, path in _HATCH_PATHS.items()
    ]
    return f"<defs>{''.join(patterns)}</defs>"


def document(picture: Picture) -> str:
    """A file of its own, with a background, light or dark as the viewer prefers."""
    style = f":root{{{variables(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}{classes()}"
    background = '<rect width="100%" height="100%" class="f-paper"/>'
    return _svg(picture, f"<style>{style}</style>{hatches()}{background}") + "\n"


def inline(picture: Picture) -> str:
    """A part of a page that has `classes` and `hatches`."""
    return _svg(picture, "")


def _svg(picture: Picture, head: str) -> str:
    size = f'width="{_n(picture.width)}" height="{_n(picture.height)}"'
    box = f'viewBox="0 0 {_n(picture.width)} {_n(picture.height)}"'
    shapes = "\n".join(map(_shape, picture.shapes))
    name = escape(picture.title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" aria-label="{name}">{head}\n{shapes}\n</svg>'
    )


def _n(value: float) -> str:
    """A number with at most one decimal, which is finer than a screen."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _shape(shape: Shape) -> str:
    if isinstance(shape, Area):
        return _area(shape)
    if isinstance(shape, FilledOutline):
        return _region(shape)
    if isinstance(shape, Stroke):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.points)
        dash = f' stroke-dasharray="{" ".join(map(_n, shape.dash))}"' if shape.dash else ""
        drawn = f'class="s-{shape.colour}" fill="none" stroke-width="{_n(shape.width)}"{dash}'
        return _element(f'polyline points="{points}" {drawn}', shape.key, shape.tip)
    if isinstance(shape, Marker):
        return _mark(shape)
    return _label(shape)


def _area(area: Area) -> str:
    place = f'x="{_n(area.x)}" y="{_n(area.y)}" width="{_n(area.width)}" height="{_n(area.height)}"'
    fill = f"f-{area.paint.colour}" if area.paint else ""
    edge = f"s-{area.outline}" if area.outline else ""
    drawn = f'class="{" ".join(filter(None, (fill, edge)))}"' if fill or edge else ""
    drawn += "" if area.paint else ' fill="none"'
    drawn += "" if area.paint or area.outline else ' pointer-events="all"'  # it is there for its tip
    drawn += ' stroke-dasharray="4 2"' if area.dashed else ""
    text = _element(f"rect {place} {drawn}", area.key, area.tip)
    if area.paint and area.paint.hatch:
        pattern = f'rect {place} fill="url(#h-{HATCH_NAMES[area.paint.hatch]})" opacity="0.55"'
        text += _element(pattern, area.key, area.tip)
    return text


def _region(region: FilledOutline) -> str:
    corners = " ".join(f"{_n(x)},{_n(y)}" for x, y in region.points)
    edge = f" s-{region.outline}" if region.outline else ""
    drawn = f'polygon points="{corners}" class="f-{region.paint.colour}{edge}" stroke-width="0.6"'
    text = _element(drawn, region.key, region.tip)
    if region.paint.hatch:
        pattern = f'polygon points="{corners}" fill="url(#h-{HATCH_NAMES[region.paint.hatch]})" opacity="0.55"'
        text += _element(pattern, region.key, region.tip)
    return text


def outline_of(mark: Marker) -> tuple[tuple[float, float], ...]:
    """The corners of a mark that is no circle; of a cross, the ends of its two lines in turn."""
    factor, corners = _CORNERS[mark.kind]
    x, y, side = mark.x, mark.y, mark.radius * factor
    return tuple((x + side * right, y + side * down) for right, down in corners)


def _mark(mark: Marker) -> str:
    if mark.kind == "circle":
        place = f'cx="{_n(mark.x)}" cy="{_n(mark.y)}" r="{_n(mark.radius)}"'
        return _element(f'circle {place} class="f-{mark.colour} s-paper"', mark.key, mark.tip)
    corners = outline_of(mark)
    if mark.kind == "cross":
        first, second = (" L".join(f"{_n(x)},{_n(y)}" for x, y in ends) for ends in (corners[:2], corners[2:]))
        drawn = f'class="s-{mark.colour}" fill="none" stroke-width="2"'
        return _element(f'path d="M{first} M{second}" {drawn}', mark.key, mark.tip)
    points = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
    return _element(f'polygon points="{points}" class="f-{mark.colour} s-paper"', mark.key, mark.tip)


def _label(label: Label) -> str:
    place = f'x="{_n(label.x)}" y="{_n(label.y)}" font-size="{_n(label.size_px)}" class="f-{label.colour}"'
    place += f' text-anchor="{label.anchor}"' if label.anchor != "start" else ""
    place += ' font-weight="600"' if label.bold else ""
    place += f' transform="rotate(-90 {_n(label.x)} {_n(label.y)})"' if label.turned else ""
    return _element(f"text {place}", label.key, label.tip, escape(label.text, quote=False))


def _element(text: str, key: int | None, tip: str, inside: str = "") -> str:
    """One element. key: as data-row, by which a page highlights what belongs to a row of its table."""
    name = text.partition(" ")[0]
    row = f' data-row="{key}"' if key is not None else ""
    inside += f"<title>{escape(tip, quote=False)}</title>" if tip else ""
    return f"<{text}{row}>{inside}</{name}>" if inside else f"<{text}{row}/>"
