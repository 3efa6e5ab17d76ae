"""What each setting of a sweep changed. Pure.

[Note: matched points]
Two points are matched for a setting if they differ in nothing else. Only such points are compared: a mean over all
points of a value would also show what happened to be measured with it, as after some points failed. The share of a
setting (Sobol's total index) is the mean variance within its groups of matched points, as a part of the variance of all
points, both of logarithms: it is what the speeds would still vary by if everything else were fixed. Shares add up to
more than 1 where settings act together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.report.varied import Varied


class PairedChange(NamedTuple):
    """How a value of a setting compares with another in matched points, as ratios less 1. pairs: their number."""

    low: float
    middle: float
    high: float
    pairs: int


def changes(
    setting: Varied, others: Sequence[Varied], values: Sequence[float | None], reference: str
) -> dict[str, PairedChange]:
    """How much larger `values` is with each level than with the reference level; see [Note: matched points].

    values: of each point, positive; None for points without one. Levels that have no matched point are left out.
    """
    found: dict[str, list[float]] = {}
    for group in _groups(setting, others, values).values():
        base = group.get(reference)
        for level, value in group.items() if base else ():
            if level != reference:
                found.setdefault(level, []).append(value / (base or 1.0) - 1)
    return {
        level: PairedChange(min(ratios), statistics.median(ratios), max(ratios), len(ratios))
        for level, ratios in found.items()
    }


def share(setting: Varied, others: Sequence[Varied], values: Sequence[float | None]) -> float | None:
    """The share of a setting in the variance of the logarithms; None if too little was measured to tell."""
    logarithms = [math.log(value) for value in values if value is not None and value > 0]
    if len(logarithms) < 3 or (total := statistics.pvariance(logarithms)) == 0:
        return None
    groups = [group for group in _groups(setting, others, values).values() if len(group) > 1]
    if not groups:
        return None
    within = [statistics.pvariance([math.log(value) for value in group.values()]) for group in groups]
    return statistics.mean(within) / total


def share_of_ranges(ranges: Sequence[tuple[float, float] | None], values: Sequence[float | None]) -> float | None:
    """What the variance of the logarithms would be if points differed by half of their ranges alone, as a share of the
    variance that there is; None if too little was measured to tell."""
    halves = [math.log(ends[1] / ends[0]) / 2 for ends in ranges if ends is not None and 0 < ends[0] <= ends[1]]
    logarithms = [math.log(value) for value in values if value is not None and value > 0]
    if not halves or len(logarithms) < 3 or (total := statistics.pvariance(logarithms)) == 0:
        return None
    return statistics.mean(half * half for half in halves) / total


def _groups(
    setting: Varied, others: Sequence[Varied], values: Sequence[float | None]
) -> Mapping[tuple[str, ...], dict[str, float]]:
    """The value at each level of the setting, by the values of all other settings."""
    groups: dict[tuple[str, ...], dict[str, float]] = {}
    for number, value in enumerate(values):
        if value is not None and value > 0:
            key = tuple(other.values[number] for other in others)
            groups.setdefault(key, {}).setdefault(setting.values[number], value)
    return groups


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points (cost, gain) that no other beats in one without being worse in the other, by growing cost."""
    order = sorted(range(len(points)), key=lambda at: (points[at][0], -points[at][1]))
    front: list[int] = []
    for at in order:
        if not front or points[at][1] > points[front[-1]][1]:
            front.append(at)
    return front


def other_than(settings: Sequence[Varied], one: Varied) -> list[Varied]:
    """All settings but one."""
    return [setting for setting in settings if setting is not one]
