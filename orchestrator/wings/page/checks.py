"""Reasons to doubt a row: noise, a speed that changes while it is measured, another loss for the same work. Pure.

[Note: a different loss]
Points with the same model, data, seed, optimizer, tokens per step and steps compute the same updates, apart from
rounding and the order of sums, and their curves stay close for the few steps of a measurement. A loss that is farther
than LOSS_SHARE from the median of such points is named: a fast row that learns something else is worth nothing. What
rounds on purpose (bf16 against fp32) stays within it in the shipped models. A lossy row belongs to the points of its
exact form, and if there are exact ones, only they have a say in the median: many lossy rows do not outvote them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.lossy import exact_form, lossy_words
from orchestrator.wings.page.report_points import ReportPoint, is_finite, some_of

LOSS_SHARE = 0.02
NOISY_SHARE = 0.2  # of the median, between the ends of a row's range
DRIFT_SHARE = 0.1
LEAST_STEPS = 9  # to tell a drift: three thirds of three
# Groups of the configuration that decide what is learned, apart from rounding.
LEARNING = ("seed", "model", "adapter", "data", "optimizer", "scheduler")


def warnings(points: Sequence[ReportPoint]) -> list[str]:
    """All of them, as lines for the report."""
    measured = [point for point in points if point.result is not None]
    return [*_noise(measured), *_drifts(measured), *_losses(measured)]


def _noise(points: Sequence[ReportPoint]) -> list[str]:
    wide = {}
    for point in points:
        if point.speed is None or point.speed_range is None:
            continue
        low, high = point.speed_range
        if (width := (high - low) / point.speed) > NOISY_SHARE:
            wide[point.label] = f"{100 * width:.0f} %"
    if not wide:
        return []
    return [f"noise: the range of tokens/s is wider than {100 * NOISY_SHARE:.0f} % of its median: {_listed(wide)}"]


def _drifts(points: Sequence[ReportPoint]) -> list[str]:
    changed = {point.label: f"{100 * change:+.0f} %" for point in points if (change := drift(point)) is not None}
    if not changed:
        return []
    text = "from the first to the last third of its steps, as when a device heats up or other work starts or ends"
    return [f"the time of a step changed while a row was measured, {text}: {_listed(changed)}"]


def drift(point: ReportPoint) -> float | None:
    """The change of the median step time from the first third of the counted steps to the last; None if it is small, or
    if the middle halves of both thirds overlap."""
    times = [reading.step_ms for reading in point.steps if reading.counted]
    if len(times) < LEAST_STEPS:
        return None
    third = len(times) // 3
    if min(times) <= 0:
        return None
    first, last = sorted(times[:third]), sorted(times[-third:])
    change = statistics.median(last) / statistics.median(first) - 1
    quarter = third // 4
    apart = first[-1 - quarter] < last[quarter] or last[-1 - quarter] < first[quarter]
    return change if abs(change) > DRIFT_SHARE and apart else None


def _losses(points: Sequence[ReportPoint]) -> list[str]:
    """See [Note: a different loss]."""
    groups: dict[str, dict[str, float]] = {}
    exact: set[str] = set()
    lines = []
    for point in points:
        assert point.result is not None
        last = point.result["loss"]["last"]
        if not is_finite(last):
            lines.append(f"{point.label} ended without a finite loss")
        else:
            groups.setdefault(_work(point.entry.config, point.result), {})[point.label] = last
        if not lossy_words(point.entry.config):
            exact.add(point.label)
    for losses in groups.values():
        right = [value for label, value in losses.items() if label in exact]
        is_mixed = 0 < len(right) < len(losses)
        middle = statistics.median(right or losses.values())
        far = {label: value for label, value in losses.items() if abs(value - middle) > LOSS_SHARE * abs(middle)}
        if far and (is_mixed or len(losses) > 2):
            named = _listed({label: f"{value:.4f}" for label, value in far.items()})
            rows = "the exact rows" if is_mixed else "such rows"
            lines.append(f"the same work ended at another loss: {named}; the median of {rows} is {middle:.4f}")
        elif far:
            named = _listed({label: f"{value:.4f}" for label, value in losses.items()})
            lines.append(f"the same work ended at different losses: {named}")
    return lines


def _work(config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Equal for rows that should learn the same, lossy or not."""
    exact = exact_form(config)
    learned = {group: exact.get(group) for group in LEARNING}
    return repr((learned, result["data"]["hash"], result["batch"]["tokens_per_step"], result["steps"]))


def _listed(values: Mapping[str, str]) -> str:
    return some_of([f"{label} ({value})" for label, value in values.items()])
