"""The pictures of a point's profile: memory over a step by component, and time by module. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.text.units import digits, size
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.charts import bars
from orchestrator.wings.page.charts.bar_data import Bar, BarChart, BarPart
from orchestrator.wings.page.charts.canvas import AxisUnit, size_unit
from orchestrator.wings.page.charts.palette import PAINTS, Paint
from orchestrator.wings.page.charts.regions import StackedAreas, stacked_areas
from orchestrator.wings.page.report_points import ReportPoint, length

MOST_PROFILES = 4  # that the page shows, by the order of the table
MOST_MODULES = 14
WAYS = {"forward": PAINTS[1], "recompute": PAINTS[3], "backward": PAINTS[0]}
OUTSIDE = Paint("grey", "-")
# From below: what changes least comes first, so that the layers above stand on level ground.
LAYERS = {
    "other": ("other tensors", PAINTS[7]),
    "parameters": ("parameters", PAINTS[0]),
    "masters": ("master weights", PAINTS[6]),
    "optimizer_states": ("optimizer states", PAINTS[2]),
    "gradients": ("gradients", PAINTS[1]),
    "messages": ("messages", PAINTS[4]),
    "activations": ("activations", PAINTS[3]),
    "temporary": ("temporary", PAINTS[5]),
}
NAMES = {key: name for key, (name, _) in LAYERS.items()}


class ShownProfile(NamedTuple):
    """A point whose profile is shown, with its pictures."""

    point: ReportPoint
    figures: tuple[Figure, ...]


def shown_profiles(points: Sequence[ReportPoint]) -> list[ShownProfile]:
    """The first points of the table that have a profile."""
    profiled = [point for point in points if point.profile][:MOST_PROFILES]
    return [
        ShownProfile(point, (over_time(point, number), by_module(point, number)))
        for number, point in enumerate(profiled, start=1)
    ]


def over_time(point: ReportPoint, number: int) -> Figure:
    """Memory of the rank with the highest peak over the profiled step."""
    profile = point.profile
    line, peak = profile["timeline"], profile["peak"]
    layers = [(BarPart(*LAYERS[key]), _lengths(line["bytes"].get(key, ()))) for key in LAYERS]
    starts = tuple(map(float, line["ms"])) or (0.0,)
    empty = (0.0,) * len(starts)
    chart = StackedAreas(
        f"Memory over a step: {point.label}",
        "time of the profiled step",
        AxisUnit("ms"),
        f"tensors of rank {profile['rank']}",
        size_unit(length(peak["bytes"])),
        starts,
        float(profile["step_ms"]),
        tuple((part, values if len(values) == len(starts) else empty) for part, values in layers),
        tuple((one["name"], float(one["start_ms"]), float(one["end_ms"])) for one in line["phases"]),
        (float(peak["ms"]), length(peak["bytes"]), f"peak {size(peak['bytes'])} in {place_of(peak)}"),
    )
    caption = (
        "Every allocation of the profiled step on the rank with the highest peak, in its order; each column shows the "
        "moment of the most memory in it. Temporary is working memory of operations and gradients of activations."
    )
    return Figure(f"memory_over_time_{number}", stacked_areas(chart), caption)


def _lengths(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(length(value) for value in values)


def place_of(peak: Mapping[str, Any]) -> str:
    """Where the peak is, in words."""
    return " of ".join(filter(None, (peak["phase"] or "no phase", peak["module"])))


def by_module(point: ReportPoint, number: int) -> Figure:
    """Time of the profiled step by module, and what belongs to none."""
    profile = point.profile
    modules = profile["modules"]
    parts = tuple(BarPart(way, paint) for way, paint in WAYS.items())
    rows = [_module_bar(one) for one in modules[:MOST_MODULES]]
    if rest := modules[MOST_MODULES:]:
        sums = {key: sum(length(one[key]) for one in rest) for key in rest[0] if key != "name"}
        rows.append(_module_bar({"name": f"{len(rest)} more modules", **sums}))
    outside = sorted(profile["outside_ms"].items(), key=lambda one: -length(one[1]))
    whole = BarPart("in no module", OUTSIDE)
    rows += [
        Bar(name.replace("_", " "), (0.0, 0.0, 0.0, length(ms)), note=f"{digits(length(ms))} ms")
        for name, ms in outside
        if length(ms) >= length(profile["step_ms"]) / 1000
    ]
    chart = BarChart(f"Time by module: {point.label}", "", AxisUnit("ms"), (*parts, whole), tuple(rows))
    on_gpu = profile.get("device") == "cuda"
    caption = (
        f"Time of the {'GPU' if on_gpu else 'rank'} in the profiled step, on the rank with the highest peak of memory; "
        "* stands for the layers together, and a module's time is without that of the modules in it. At the end: "
        "operations per second of its products. Profiling adds some microseconds to each call and operation."
    )
    return Figure(f"time_by_module_{number}", bars.picture_of(chart), caption)


def _module_bar(module: Mapping[str, Any]) -> Bar:
    times = [length(module[f"{way}_ms"]) for way in WAYS]
    flops, ms = sum(length(module[f"{way}_flops"]) for way in WAYS), sum(times)
    rate = f", {flops_text(flops / ms * 1e3)}/s" if flops and ms else ""
    return Bar(module["name"], (*times, 0.0), note=f"{digits(ms)} ms{rate}")


def flops_text(flops: float) -> str:
    """A number of operations with its unit."""
    for unit, divisor in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= divisor:
            return f"{digits(flops / divisor)} {unit}"
    return f"{flops:,.0f} FLOP"
