"""Detects drift: if a row's readings move over the rounds, its median depends on when the row was measured."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise

LEAST_ROUNDS = 6  # two in each third
STANDARD_ERRORS = 5
TELLABLE = 0.25  # a spread that explains more could hide a drift that changes the conclusions
# For normal noise, the median of |a - b| for two readings is 0.6745 * sqrt(2) standard deviations, and the standard
# error of the median of k readings is sqrt(pi / 2) standard deviations over sqrt(k).
MEDIAN_STEP = 0.6745 * math.sqrt(2)
MEDIAN_SCATTER = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Drift:
    """By how much later readings exceed earlier ones, and how much of that their spread can explain; 0.05 is 5 %."""

    moved: float
    explained: float

    @property
    def found(self) -> bool:
        return abs(self.moved) > self.explained

    def __str__(self) -> str:
        return f"{100 * self.moved:+.1f} % (spread explains {100 * self.explained:.1f} %)"


def drift_of(readings: list[float]) -> Drift | None:
    """The drift of readings that are in the order of their rounds; None if there are too few to judge.

    The median of the last third is compared with that of the first. The spread is computed from the steps between
    neighbouring rounds, less the typical step, which is the drift itself; medians make it ignore single slow rounds.
    It explains five standard errors of the difference of two medians of a third. With fewer than five, steady rows
    would too often count as drifting, since a dozen readings give the spread only roughly and a dozen rows are checked.
    """
    if len(readings) < LEAST_ROUNDS:
        return None
    third = len(readings) // 3
    first, last = statistics.median(readings[:third]), statistics.median(readings[-third:])
    steps = [after - before for before, after in pairwise(readings)]
    typical = statistics.median(steps)
    deviation = statistics.median(abs(step - typical) for step in steps) / MEDIAN_STEP
    explained = STANDARD_ERRORS * math.sqrt(2) * MEDIAN_SCATTER * deviation / math.sqrt(third)
    return Drift(last / first - 1, explained / first)


def drift_verdict(what: str, rows: dict[str, list[float]]) -> str:
    """One line about the drift of all rows, whether or not any row moved."""
    drifts = {name: drift for name, readings in rows.items() if (drift := drift_of(readings)) is not None}
    if len(drifts) < len(rows):
        return f"Drift of {what}: not judged, at least {LEAST_ROUNDS} rounds are needed."
    moved = {name: drift for name, drift in drifts.items() if drift.found}
    if moved:
        listed = ", ".join(f"{name} {drift}" for name, drift in moved.items())
        return (
            f"Drift of {what}: WARNING, {len(moved)} of {len(rows)} rows moved between the first and the last third of "
            f"the rounds: {listed}."
        )
    blurred = {name: drift for name, drift in drifts.items() if drift.explained > TELLABLE}
    if blurred:
        listed = ", ".join(f"{name} {drift}" for name, drift in blurred.items())
        return (
            f"Drift of {what}: WARNING, {len(blurred)} of {len(rows)} rows scatter too much to tell; measure again on "
            f"a quiet machine: {listed}."
        )
    name, most = max(drifts.items(), key=lambda item: abs(item[1].moved))
    return (
        f"Drift of {what}: none of {len(rows)} rows moved between the first and the last third of the rounds by more "
        f"than its spread explains; most moved {name}, {most}."
    )
