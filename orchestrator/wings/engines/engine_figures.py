"""The pictures of a comparison of engines: distances from plain PyTorch's losses, and memory on one scale. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.text.units import difference, size
from orchestrator.wings.engines.columns import above_start
from orchestrator.wings.engines.distances import Distance, distances_of
from orchestrator.wings.engines.equality import REFERENCE
from orchestrator.wings.engines.places import kind_of
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.charts import bars
from orchestrator.wings.page.charts.bar_data import Bar, BarChart, BarPart, largest_seen
from orchestrator.wings.page.charts.canvas import AxisUnit, LegendEntry, size_unit
from orchestrator.wings.page.charts.palette import PAINTS, SERIES
from orchestrator.wings.page.charts.planes import LineSeries, Plane, curves
from orchestrator.wings.page.report_points import ReportPoint, is_finite, length

FLOOR = -4  # the power of ten of the bound that is drawn for all that is closer, equal losses too
MARKS = {-4: "≤ 0.01 %", -3: "0.1 %", -2: "1 %", -1: "10 %", 0: "the bound", 1: "10 x", 2: "100 x", 3: "1,000 x"}


def figures_of(points: Sequence[ReportPoint]) -> list[Figure]:
    """Those for which there are numbers."""
    found = (distance_figure(points), memory_figure(points))
    return [figure for figure in found if figure is not None]


def distance_figure(points: Sequence[ReportPoint]) -> Figure | None:
    """For each step the distance of the loss from plain PyTorch's, as a share of the bound; None without one."""
    far = distances_of([point.entry for point in points])
    curved = {label: _curve(distances["loss"]) for label, distances in far.items()}
    shown = [point for point in points if curved.get(point.label)]
    if not shown or all(kind_of(point.entry) != REFERENCE for point in points):
        return None
    kinds = list(dict.fromkeys(kind_of(point.entry) for point in shown))
    styles = dict(zip(kinds, SERIES, strict=False))
    lines = [
        LineSeries(point.label, curved[point.label], styles[kind_of(point.entry)], point.number, width=1.2)
        for point in shown
    ]
    highest = max(y for line in lines for _, y in line.points)
    plane = Plane(
        "Distance of the loss from plain PyTorch's",
        "step",
        "",
        AxisUnit(""),
        AxisUnit("share of the bound"),
        tuple(LegendEntry(kind, style) for kind, style in styles.items()),
        level=0.0,
        y_marks=tuple((at, text) for at, text in MARKS.items() if at <= max(highest, 0)),
    )
    caption = (
        "A curve for each row, in the colour of its engine: the relative distance of each step's loss from that of "
        "plain PyTorch in one process, as a share of the bound up to which the work counts as equal (dashed). The axis "
        "is logarithmic."
    )
    return Figure("distance", curves(plane, lines), caption)


def _curve(far: Distance) -> tuple[tuple[float, float], ...]:
    """The powers of ten of the shares of the bounds."""
    known = [(step, share) for step, share in enumerate(far.shares, 1) if share is not None and is_finite(share)]
    return tuple((step, max(math.log10(share), FLOOR) if share else FLOOR) for step, share in known)


def memory_figure(points: Sequence[ReportPoint]) -> Figure | None:
    """The peak of a rank of every engine on one scale, with what was predicted; None if it is not known."""
    peaks = {point.number: _peaks(point.result) for point in points}
    known = [found for found in peaks.values() if found]
    if not known:
        return None
    on_device = any(len(found) > 1 for found in known)
    names = ("allocated", "reserved besides") if on_device else ("above the start",)
    chart = BarChart(
        "Peak memory of one rank, every engine on one scale",
        "largest over the ranks",
        size_unit(largest_seen([sum(found) for found in known])),
        tuple(BarPart(name, paint) for name, paint in zip(names, (PAINTS[0], PAINTS[-1]), strict=False)),
        tuple(_peak_bar(point, peaks[point.number], len(names)) for point in points),
        outline_name="predicted peak of a step",
        cuts=True,
    )
    caption = (
        "Bars: what the allocator of the device had given out at the peak, and what it had reserved."
        if on_device
        else "Bars: the resident memory of a rank's process at its peak, above what it had before its engine was built "
        "(a rank that imports more starts higher), with what its libraries take besides tensors."
    )
    return Figure("engine_memory", bars.picture_of(chart), f"{caption} Dashed: predicted by the rules of the engine.")


def _peaks(result: Mapping[str, Any] | None) -> list[float]:
    """Allocated and reserved besides on a device; above the start on a CPU; empty if it is not known."""
    memory = (result or {}).get("memory") or {}
    allocated, reserved = memory.get("peak_allocated_bytes"), memory.get("peak_reserved_bytes")
    if allocated is not None:
        return [length(allocated), length((reserved or allocated) - allocated)]
    above = above_start(result)
    return [] if above is None else [length(above)]


def _peak_bar(point: ReportPoint, peaks: Sequence[float], parts: int) -> Bar:
    label = f"{point.place}  {point.label}".strip()
    predicted = length(((point.result or {}).get("memory") or {}).get("peak_predicted_bytes")) or None
    predicted = predicted or length(point.predicted.get("needed")) or None
    lengths = (*peaks, *[0.0] * parts)[:parts]
    if peaks:
        # Resident memory, the one number of a CPU rank, has more in it than the tensors that are predicted.
        note = size(peaks[0]) + (f", {difference(peaks[0], predicted)}" if predicted and len(peaks) > 1 else "")
    else:
        note = f"{point.entry.state}{f', needs {size(predicted)}' if predicted else ''}"
    return Bar(label, lengths, point.number, outline=predicted, note=note, lacking=not peaks)
