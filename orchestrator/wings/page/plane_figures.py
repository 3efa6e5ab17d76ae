"""The report's pictures of relations: speed and memory, steps and loss, ranks and speed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.report.varied import Varied
from orchestrator.rounds.intervals import LEAST
from orchestrator.text.units import digits, size
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.charts.bar_data import largest_seen
from orchestrator.wings.page.charts.canvas import AxisUnit, LegendEntry, size_unit
from orchestrator.wings.page.charts.palette import SERIES, SeriesStyle
from orchestrator.wings.page.charts.planes import Dot, LineSeries, Plane, curves, scatter
from orchestrator.wings.page.report_points import ReportPoint, group_of, length, speeds_untold
from orchestrator.wings.page.scaling import WORDS, Scaling, scalings, world_of

PERCENT = AxisUnit("%", 0.01)
MOST_CURVES = len(SERIES)  # with a style and a name of their own
MOST_STEPS = 2000  # of a curve: more than a picture has columns
PALE = SeriesStyle("grey", "circle")
MOST_NAMED = 8  # points of the front


# ---- speed against memory -------------------------------------------------------------------------------------------


def speed_and_memory(points: Sequence[ReportPoint], settings: Sequence[Varied]) -> Figure | None:
    """Each measured point, and the Pareto front; None with fewer than two."""
    shown = [(point, point.speed, point.memory_bytes) for point in points]
    places = [(point, speed, bytes_) for point, speed, bytes_ in shown if speed is not None and bytes_ is not None]
    if len(places) < 2:
        return None
    styles, legend = _styles([point for point, _, _ in places], settings)
    untold = speeds_untold([point for point, _, _ in places])
    rivals = [
        at for at, (point, _, _) in enumerate(places) if not untold and not point.ranked.apart and point.has_rounds
    ]
    front = [rivals[at] for at in pareto([(places[at][2], places[at][1]) for at in rivals])]
    named = {at: places[at][0].label for at in front[:MOST_NAMED]}
    sizes = [bytes_ for _, _, bytes_ in places]
    unit, marks = size_unit(max(sizes)), tuple[tuple[float, str], ...]()
    if max(sizes) > largest_seen(sizes) and min(sizes) > 0:  # a logarithmic axis, else most points were on one spot
        powers = range(math.ceil(math.log2(min(sizes))), math.floor(math.log2(max(sizes))) + 1)
        unit, marks = AxisUnit("logarithmic"), tuple((float(one), size(2**one)) for one in powers[:: len(powers) // 4])
    dots = [
        Dot(
            math.log2(bytes_) if marks else bytes_,
            speed,
            styles[at],
            point.number,
            named.get(at, ""),
            point.speed_range,
            f"{point.label}: {digits(speed)} tokens/s, {size(bytes_)}",
        )
        for at, (point, speed, bytes_) in enumerate(places)
    ]
    on_device = places[0][0].on_device
    plane = Plane(
        "Speed against memory",
        "peak of the device's allocator, largest over the ranks" if on_device else "counted tensors of a rank",
        "speed of all ranks",
        unit,
        AxisUnit("tokens/s"),
        legend,
        x_marks=marks,
        front=tuple((dots[at].x, dots[at].y) for at in front),
    )
    names = ", ".join(named.values()) + (" and more" if len(front) > len(named) else "")
    caption = "Up and left is better. " + (
        f"No point is said to be better than another: {untold}."
        if untold
        else "Dashed: the Pareto front, which are the points that no other beats in both speed and memory, by their "
        f"medians: {names}."
    )
    return Figure("speed_and_memory", scatter(plane, dots), caption)


def _styles(
    points: Sequence[ReportPoint], settings: Sequence[Varied]
) -> tuple[list[SeriesStyle], tuple[LegendEntry, ...]]:
    """Colours by the first setting with few values, markers by the second; one style if there is none."""
    few = [setting for setting in settings if len(setting.levels) <= len(SERIES)][:2]
    plain = SERIES[0]
    if not few:
        return [plain] * len(points), ()
    colours = {level: SERIES[at].colour for at, level in enumerate(few[0].levels)}
    if len(few) == 1:
        both = {level: SERIES[at] for at, level in enumerate(few[0].levels)}
        legend = tuple(_sign(few[0], level, style) for level, style in both.items())
        return [both[few[0].values[point.number]] for point in points], legend
    markers = {level: SERIES[at].marker for at, level in enumerate(few[1].levels)}
    legend = (
        *(_sign(few[0], level, SeriesStyle(colour, "circle")) for level, colour in colours.items()),
        *(_sign(few[1], level, SeriesStyle("ink", marker)) for level, marker in markers.items()),
    )
    found = [
        SeriesStyle(colours[few[0].values[point.number]], markers[few[1].values[point.number]]) for point in points
    ]
    return found, legend


def _sign(setting: Varied, level: str, style: SeriesStyle) -> LegendEntry:
    return LegendEntry(f"{setting.name}={level}", style, with_line=False)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points (cost, gain) that no other beats in one without being worse in the other, by growing cost."""
    order = sorted(range(len(points)), key=lambda at: (points[at][0], -points[at][1]))
    front: list[int] = []
    for at in order:
        if not front or points[at][1] > points[front[-1]][1]:
            front.append(at)
    return front


# ---- learning -------------------------------------------------------------------------------------------------------


def learning(points: Sequence[ReportPoint]) -> Figure | None:
    """The loss of each step; None if no point recorded two."""
    curved = [point for point in points if len(point.steps) > 1]
    if not curved:
        return None
    tokens = {_tokens(point) for point in curved}
    by_tokens = len(tokens) > 1
    named = curved[:MOST_CURVES]
    lines = [_curve(point, PALE, by_tokens=by_tokens) for point in curved[MOST_CURVES:]]
    lines += [_curve(point, style, by_tokens=by_tokens) for point, style in zip(named, SERIES, strict=False)]
    legend = [LegendEntry(point.label, style) for point, style in zip(named, SERIES, strict=False)]
    more = len(curved) - len(named)
    legend += [LegendEntry(f"{more} more", PALE)] if more else []
    longest = max(x for line in lines for x, _ in line.points)
    x_unit = AxisUnit("steps")
    if by_tokens:
        x_unit = AxisUnit("million tokens", 1e6) if longest > 2e6 else AxisUnit("tokens")
    plane = Plane("Training loss", "trained on", "loss", x_unit, AxisUnit("nats a token"), tuple(legend))
    caption = (
        "The loss of each step, warm-up included, of the first rows of the table; a larger mark at the end is the loss "
        "on held-out data. Curves of the same work lie on each other."
    )
    if any(len(point.steps) > MOST_STEPS for point in curved):
        caption += f" Of a long training, at most {MOST_STEPS:,} steps, evenly spread."
    if any(len(point.validations) > 1 for point in named):
        caption += " Dotted: that loss during training."
    if by_tokens:
        caption += " The points differ in tokens per step, so the axis counts tokens."
    return Figure("learning", curves(plane, lines), caption)


def _tokens(point: ReportPoint) -> float:
    return length(group_of(point.result, "batch").get("tokens_per_step"))


def _curve(point: ReportPoint, style: SeriesStyle, *, by_tokens: bool) -> LineSeries:
    factor = _tokens(point) if by_tokens else 1
    every = -(-len(point.steps) // MOST_STEPS)
    readings = [*point.steps[:-1:every], *point.steps[-1:]]
    points = tuple((reading.step * factor, reading.loss) for reading in readings)
    held = tuple((step * factor, value) for step, value in point.validations)
    return LineSeries(
        point.label,
        points,
        style,
        point.number,
        end=held[-1] if held else None,
        beside=held,
        width=1.0 if style is PALE else 1.8,
    )


# ---- scaling --------------------------------------------------------------------------------------------------------


def scaling(points: Sequence[ReportPoint]) -> Figure | None:
    """tokens/s of a rank against those of the smallest number of ranks; None if the number does not vary."""
    series = scalings(points)
    if not series:
        return None
    named = series[:MOST_CURVES]
    lines = [_scaling_line(one, style) for one, style in zip(named, SERIES, strict=False)]
    legend = tuple(LegendEntry(line.name, line.style) for line in lines)
    worlds = sorted({world_of(point) for one in named for point in one.points})
    plane = Plane(
        "Scaling efficiency",
        "number of ranks",
        "tokens/s of a rank, of that of the baseline",
        AxisUnit(""),
        PERCENT,
        legend,
        y_from_zero=True,
        x_marks=tuple((math.log2(world), str(world)) for world in worlds),
        level=1.0,
    )
    kinds = "; ".join(dict.fromkeys(WORDS[one.kind] for one in named))
    caption = "100 %: each rank is as fast as one of the baseline, which has the fewest ranks. "
    caption += f"{kinds[:1].upper()}{kinds[1:]}."
    caption += f" Not drawn: {len(series) - len(named)} more series." if len(series) > len(named) else ""
    if any(not point.has_rounds for one in named for point in one.points):
        caption += f" A point without a range had fewer than {LEAST} rounds, so its difference may be noise."
    return Figure("scaling", curves(plane, lines), caption)


def _scaling_line(one: Scaling, style: SeriesStyle) -> LineSeries:
    shares = [one.efficiency(point) for point in one.points]
    places = tuple((math.log2(world_of(point)), share[1]) for point, share in zip(one.points, shares, strict=True))
    name = f"{one.kind}: from {one.base.label}"
    return LineSeries(name, places, style, spreads=tuple((low, high) for low, _, high in shares))
