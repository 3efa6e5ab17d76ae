"""The number of a point with few rounds, and the interval in which it lies. Pure, and the same on every machine.

The number of a point is the median of its rounds' medians. Two points are compared by comparison.py.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEAST = 3  # rounds below which nothing is ranked: a bootstrap has nothing to draw from
CONTROLLED = 6  # rounds below which the reference work is not used
INTERVAL = 0.95
RESAMPLED = 1000  # bootstrap samples
SEED = 0


class RoundsEstimate(NamedTuple):
    """A number with the interval in which it lies with the probability INTERVAL."""

    low: float
    middle: float
    high: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values is, the nearest one."""
    return sorted(values)[round(share * (len(values) - 1))]


def interval(drawn: Sequence[float]) -> tuple[float, float]:
    """The middle part INTERVAL of bootstrap samples."""
    tail = (1 - INTERVAL) / 2
    return percentile(drawn, tail), percentile(drawn, 1 - tail)


def of_rounds(medians: Sequence[float]) -> RoundsEstimate:
    """The number of a point whose rounds have these medians."""
    # Rounds are drawn, not steps: the steps of one round share its moment (another program, a clock, the place of a
    # process in memory), and how much they differ does not tell how much the next round differs.
    generator = random.Random(SEED)
    drawn = [statistics.median(generator.choices(medians, k=len(medians))) for _ in range(RESAMPLED)]
    low, high = interval(drawn)
    return RoundsEstimate(low, statistics.median(medians), high)
