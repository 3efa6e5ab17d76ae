"""The report's bars: tokens/s, memory by component, time by phase, and bytes sent against theory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.report import ranking
from orchestrator.report.summary import PHASES, STATES
from orchestrator.rounds.intervals import LEAST
from orchestrator.text.units import ABSENT, difference, digits, size
from orchestrator.wings.page.charts import bars
from orchestrator.wings.page.charts.bar_data import Bar, BarChart, BarPart, largest_seen
from orchestrator.wings.page.charts.canvas import AxisUnit, LegendEntry, Picture, size_unit
from orchestrator.wings.page.charts.palette import APART, BEST, OTHERS, PAINTS, UNRANKED, Paint
from orchestrator.wings.page.report_points import ReportPoint, length

OTHER = "other tensors"
COMPONENTS = {**STATES, "activations": "activations", "other": OTHER}
RANGE_WORDS = (
    "the 95 % range between rounds, none from fewer than 3; ties are judged round by round, so ranges of "
    "rows that differ may overlap"
)
REST = ("other", "other")  # of the phases: the rest of a step


class Figure(NamedTuple):
    """A picture of the report. name: of its file. caption: what it shows and how to read it."""

    name: str
    picture: Picture
    caption: str


def _measured(points: Sequence[ReportPoint]) -> list[ReportPoint]:
    return [point for point in points if point.result is not None]


def _bar(point: ReportPoint, lengths: Sequence[float], **more: Any) -> Bar:
    return Bar(f"{point.place}  {point.label}".strip(), tuple(lengths), point.number, **more)


# ---- speed ----------------------------------------------------------------------------------------------------------


def speed(points: Sequence[ReportPoint]) -> Figure:
    """tokens/s with the range between rounds; points without a result have a cross and their state."""
    chart = BarChart(
        "Speed of all ranks",
        "",
        AxisUnit("tokens/s"),
        (BarPart("tokens/s", OTHERS),),
        tuple(_speed_bar(point) for point in points),
        more_legend=_speed_legend(points),
    )
    metric = points[0].ranked.metric
    order = "" if metric == ranking.DEFAULT_METRIC else "The rows are not ordered by speed. "
    caption = f"Bars: median. Whiskers: {RANGE_WORDS}. {order}Rule: {ranking.rule(metric)}."
    return Figure("speed", bars.picture_of(chart), caption)


def _speed_bar(point: ReportPoint) -> Bar:
    speed = point.speed
    if speed is None:
        return _bar(point, (0.0,), note=point.entry.state, lacking=True)
    reused = ", reused" if point.entry.is_reused else ""
    note = f"{digits(speed)}{reused}{', no place' if point.ranked.apart else ''}"
    return _bar(point, (speed,), spread=point.speed_range, note=note, paint=_speed_paint(point))


def _speed_paint(point: ReportPoint) -> Paint:
    if point.ranked.apart:
        return APART
    if not point.has_rounds:  # it may still be first by another metric, such as its loss
        return UNRANKED
    return BEST if point.ranked.place == 1 else OTHERS


def _speed_legend(points: Sequence[ReportPoint]) -> tuple[LegendEntry, ...]:
    paints = {point.number: _speed_paint(point) for point in points if point.speed is not None}
    firsts = Counter(point.ranked.table for point in points if paints.get(point.number) == BEST)
    ties = " and ".join(str(count) for count in firsts.values())
    words = {
        BEST: "first place" if set(firsts.values()) == {1} else f"first place, a tie of {ties}",
        OTHERS: "other points",
        UNRANKED: f"not ranked: fewer than {LEAST} rounds",
        APART: "without a place",
    }
    used = set(paints.values()) | ({OTHERS} if firsts else set())
    return tuple(LegendEntry(name, paint) for paint, name in words.items() if paint in used)


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory(points: Sequence[ReportPoint]) -> Figure:
    """Counted bytes of a rank by component, the predicted ones as an outline, and the limit of a rank."""
    names = list(dict.fromkeys(name for point in points for name in point.components))
    limits = {point.limit_bytes for point in points} - {None}
    limit = min(filter(None, limits)) if limits else None
    largest = largest_seen([sum(point.components.values()) for point in points])
    unit = size_unit(largest or limit or 1)
    chart = BarChart(
        "Memory of one rank, by component",
        "largest over the ranks",
        unit,
        tuple(BarPart(COMPONENTS.get(name, name), paint) for name, paint in zip(names, _paints(names), strict=True)),
        tuple(_memory_bar(point, names) for point in points),
        limit,
        f"limit of a rank: {size(limit)}" + (", the smallest" if len(limits) > 1 else ""),
        "predicted",
        "peak of the device's allocator",
        cuts=True,
    )
    caption = (
        "Bars: bytes that were counted, each component at its own largest. Dashed: the predicted bytes of model states "
        "and activations; of points that were not measured, the predicted peak of a step. The number at the end is the "
        "difference of the counted model states and activations from the predicted ones."
    )
    return Figure("memory", bars.picture_of(chart), caption)


def _memory_bar(point: ReportPoint, names: Sequence[str]) -> Bar:
    if point.result is None:
        needed = length(point.predicted.get("needed")) or None
        text = f"{point.entry.state}, needs {size(needed)}" if needed else point.entry.state
        return _bar(point, [0.0] * len(names), outline=needed, note=text, lacking=True)
    held, predicted = point.components, point.predicted_components
    note = size(sum(held.values()))
    if predicted:
        note += f", {difference(sum(held[name] for name in predicted), sum(predicted.values()))}"
    return _bar(
        point,
        [held.get(name, 0) for name in names],
        outline=sum(predicted.values()) if predicted else None,
        tick=point.memory_bytes if point.on_device else None,
        note=note,
    )


def _paints(names: Sequence[str]) -> list[Paint]:
    """A paint for each part, the last one for what is left over."""
    first = [name for name in names if name != "other"]
    by_name = dict(zip(first, (PAINTS[at % (len(PAINTS) - 1)] for at in range(len(first))), strict=True))
    return [by_name.get(name, PAINTS[-1]) for name in names]


# ---- time -----------------------------------------------------------------------------------------------------------


def phases(points: Sequence[ReportPoint]) -> Figure | None:
    """Where the time of a step goes; None without a measured point."""
    measured = _measured(points)
    if not measured:
        return None
    keys = [key for key, _ in PHASES]
    keys += [REST[0]] if any(_phases(point).get(REST[0]) for point in measured) else []
    names = dict((*PHASES, REST))
    chart = BarChart(
        "Where the time of a step goes",
        "",
        AxisUnit("ms"),
        tuple(BarPart(names[key], paint) for key, paint in zip(keys, _paints(keys), strict=True)),
        tuple(_phase_bar(point, keys) for point in measured),
        tick_name="median time of a step",
    )
    caption = (
        "The median of each phase over the counted steps. Exposed communication is the time that a rank spent blocked "
        "on collectives. Medians of parts need not add up to the median of the step, which is the thin line."
    )
    return Figure("phases", bars.picture_of(chart), caption)


def _phases(point: ReportPoint) -> Mapping[str, float | None]:
    assert point.result is not None
    times: Mapping[str, float | None] = point.result["phases_ms"]
    return times


def _phase_bar(point: ReportPoint, keys: Sequence[str]) -> Bar:
    assert point.result is not None
    times, step = _phases(point), length(point.result["throughput"]["step_ms"]["median"])
    exposed = length(times.get("communication_exposed"))
    waited = f", {100 * exposed / step:.0f} % exposed" if step else ""
    return _bar(point, [length(times.get(key)) for key in keys], tick=step, note=f"{digits(step)} ms{waited}")


# ---- communication --------------------------------------------------------------------------------------------------


def sent(points: Sequence[ReportPoint]) -> Figure | None:
    """Bytes that a rank sends in a step, by collective, against theory; None if nothing was sent."""
    measured = [point for point in _measured(points) if any(_sent_bytes(point).values())]
    if not measured:
        return None
    kinds = list(dict.fromkeys(kind for point in measured for kind, bytes_ in _sent_bytes(point).items() if bytes_))
    chart = BarChart(
        "Bytes that a rank sends in a step",
        "",
        size_unit(max(sum(_sent_bytes(point).values()) for point in measured)),
        tuple(BarPart(kind, paint) for kind, paint in zip(kinds, _paints(kinds), strict=True)),
        tuple(_sent_bar(point, kinds) for point in measured),
        outline_name="theory",
    )
    caption = (
        "Counted algorithmic bytes of one steady step, by collective. Dashed: the elements of the formula at the end "
        "with those of the padding, at the counted bytes per element."
    )
    return Figure("sent", bars.picture_of(chart), caption)


def _sent_bytes(point: ReportPoint) -> dict[str, float]:
    assert point.result is not None
    return {kind: length(volume["bytes"]) for kind, volume in point.result["communication"]["data"].items()}


def _sent_bar(point: ReportPoint, kinds: Sequence[str]) -> Bar:
    assert point.result is not None
    talk, found = point.result["communication"], _sent_bytes(point)
    total = sum(found.values())
    elements = sum(length(volume["elements"]) for volume in talk["data"].values())
    if talk.get("theory_elements") is None:
        return _bar(point, [found.get(kind, 0) for kind in kinds], note=size(total))
    theory = length(talk["theory_elements"]) + length(talk.get("padding_elements"))
    equal = "equal" if elements == theory else f"NOT equal: {elements:,.0f} for {theory:,.0f} elements"
    note = f"{size(total)}, {equal}" if total else ABSENT
    outline = theory * total / elements if elements else None
    return _bar(point, [found.get(kind, 0) for kind in kinds], outline=outline, note=note)
