"""The points of a sweep as the report shows them: their place, result, prediction, losses of steps and environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.records.record_file import EventTail, read_or_warn
from orchestrator.records.record_shapes import PROFILE, SWEEP
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.sweep_record import Standing, SweepPaths, standings
from orchestrator.report import ranking
from orchestrator.report.entry import Entry
from orchestrator.report.ranking import Ranked
from orchestrator.rounds import recorded
from orchestrator.rounds.intervals import LEAST

NAMED = 6
CURVE_BYTES = 4 << 20  # of the events of a point; of a longer run, the end is drawn
TRAINING_BYTES = 64 << 20  # the same of a training to an end, of which the whole curve is wanted: 200,000 steps


class StepReading(NamedTuple):
    """One step of a run. counted: it is not of the warm-up."""

    step: int
    loss: float
    step_ms: float
    counted: bool


@dataclass(frozen=True)
class ReportPoint:
    """A row of the report. number: its row in the table, from 0. planned_at: its place in the sweep. predicted: of the
    plan, before it ran.

    validations: (step, loss) of each, in order. provenance: the code, packages and machine of its attempt.
    profile: profile.json of its attempt, if it was profiled.
    """

    number: int
    ranked: Ranked
    planned_at: int = 0
    predicted: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[StepReading, ...] = ()
    validations: tuple[tuple[int, float], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> Entry:
        return self.ranked.entry

    @property
    def label(self) -> str:
        return self.entry.label

    @property
    def result(self) -> dict[str, Any] | None:
        return self.entry.result

    @property
    def place(self) -> str:
        """The place as the table shows it; empty without one."""
        if self.ranked.place is None:
            return ""
        return f"{'= ' if self.ranked.tied else ''}{self.ranked.place}"

    @property
    def speed(self) -> float | None:
        """tokens/s of all ranks; None without a positive, finite one."""
        found = ranking.METRICS[ranking.DEFAULT_METRIC].read(self.result) if self.result else None
        return found if found is not None and is_finite(found) and found > 0 else None

    @property
    def has_rounds(self) -> bool:
        """Whether its speed was measured in enough rounds to be compared with that of another point."""
        return recorded.is_ranked(self.result or {})

    @property
    def speed_range(self) -> tuple[float, float] | None:
        """The range between rounds; None without a speed, and if there is none."""
        found = ranking.speed(self.result) if self.result and self.speed is not None else None
        return (found.low, found.high) if found is not None and all(map(is_finite, found)) else None

    @property
    def components(self) -> dict[str, float]:
        """Counted bytes of a rank by component; empty without a result."""
        if self.result is None:
            return {}
        memory = self.result["memory"]
        found = {state["component"]: length(state["measured_bytes"]) for state in memory["states"]}
        others = {"activations": memory["activations_bytes"], "other": memory["other_tensors_bytes"]}
        return found | {name: length(size) for name, size in others.items()}

    @property
    def predicted_components(self) -> dict[str, float]:
        """The predicted ones of those bytes; empty if one of them is not known."""
        if self.result is None:
            return {}
        memory = self.result["memory"]
        found = {state["component"]: state["predicted_bytes"] for state in memory["states"]}
        found["activations"] = memory.get("activations_predicted_bytes")
        return {} if any(size is None for size in found.values()) else {name: length(found[name]) for name in found}

    @property
    def memory_bytes(self) -> float | None:
        """The memory by which points are compared: what the device's allocator held at the peak; on a CPU, where no
        allocator counts, all counted tensors."""
        if self.result is None:
            return None
        allocated = self.result["memory"].get("peak_allocated_bytes")
        return sum(self.components.values()) if allocated is None else length(allocated)

    @property
    def on_device(self) -> bool:
        """Whether the memory is that of a device's allocator."""
        return self.result is not None and self.result["memory"].get("peak_allocated_bytes") is not None

    @property
    def limit_bytes(self) -> float | None:
        """The memory that one rank may use, if it is known."""
        limit = self.predicted.get("limit")
        return None if limit is None else length(limit) / max(1.0, length(self.predicted.get("ranks_share")))


def speeds_untold(points: Sequence[ReportPoint]) -> str:
    """Why the speeds of the points are in no order, as the end of a sentence; empty if some were told apart."""
    # By speed, whatever sorts the table: a place by loss says nothing about speed.
    rows = ranking.rank([point.entry for point in points])
    places = [row.place for row in rows if row.place is not None]
    if any(row.may_be == 1 for row in rows):
        return "the rounds do not judge which is the fastest"
    if len(places) < 2:
        return f"speeds are ranked from {LEAST} rounds, which {len(places) or 'none'} of {len(rows)} points has"
    return "the rounds show no difference between the speeds" if max(places) == 1 else ""


def points_of(sweep: SweepPaths, ranked: Sequence[Ranked]) -> list[ReportPoint]:
    """All points of the sweep, in the order of the comparison, which is `ranked`."""
    by_label = {standing.label: (at, standing) for at, standing in enumerate(standings(sweep))}
    return [_point(number, row, *by_label[row.entry.label]) for number, row in enumerate(ranked)]


def facts_of(sweep: SweepPaths) -> Mapping[str, Any]:
    """The record of the sweep itself: its command and when it was started; empty if it cannot be read."""
    return read_or_warn(sweep.sweep, SWEEP) or {}


def _point(number: int, row: Ranked, planned_at: int, standing: Standing) -> ReportPoint:
    point = ReportPoint(number, row, planned_at, standing.planned.predicted or {})
    if standing.attempt is None or row.entry.result is None:
        return point
    steps, validations = _learned(standing.attempt, trains=row.entry.result.get("training") is not None)
    made = read_or_warn(standing.attempt.provenance) or {}
    profile = read_or_warn(standing.attempt.profile, PROFILE) if row.entry.result.get("profile") else None
    return replace(point, steps=steps, validations=validations, provenance=made, profile=profile or {})


def _learned(attempt: AttemptPaths, *, trains: bool) -> tuple[tuple[StepReading, ...], tuple[tuple[int, float], ...]]:
    """The losses of the steps and of the validations, of each step the last one that was recorded."""
    is_long = _size(attempt.metrics) > (TRAINING_BYTES if trains else CURVE_BYTES)
    events = (EventTail.of_the_end(attempt.metrics) if is_long else EventTail(attempt.metrics)).read_new()
    steps: dict[int, StepReading] = {}
    validations: dict[int, float] = {}
    for event in events:
        if event["event"] == "step" and all(is_finite(event[key]) for key in ("step", "loss", "step_ms")):
            counted = not event["warmup"] and not event.get("earlier")
            steps[event["step"]] = StepReading(event["step"], event["loss"], event["step_ms"], counted)
        elif event["event"] == "validation" and is_finite(event["step"]) and is_finite(event["loss"]):
            validations[event["step"]] = event["loss"]
    return tuple(steps[step] for step in sorted(steps)), tuple(sorted(validations.items()))


def some_of(texts: Sequence[str]) -> str:
    """The first of the texts, and how many more there are."""
    more = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {more} more" if more > 0 else "")


def group_of(data: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """A part of a record or configuration that is an object; empty if there is none."""
    part = (data or {}).get(name)
    return part if isinstance(part, Mapping) else {}


def length(value: Any) -> float:
    """The number as the length of a bar: 0 for none, and for what no bar can show."""
    return float(value) if value is not None and is_finite(value) and value > 0 else 0.0


def is_finite(value: Any) -> bool:
    """Whether it is a number that pictures can show."""
    try:
        return math.isfinite(value)
    except (OverflowError, TypeError):  # a record may hold an integer that is larger than every float
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
