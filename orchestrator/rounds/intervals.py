"""Numbers from few rounds, and the interval in which each lies. Pure, and the same on every machine.

[Note: between rounds]
The steps of one round share its moment: another program on the machine, a clock, the place of a process in memory. How
much they differ among themselves does not tell how much the next round differs. So the number of a point is the median
of its rounds' medians, and the interval is that of medians of rounds drawn with replacement (a bootstrap). With fewer
than LEAST rounds there is nothing to draw from.

[Note: the same rounds]
Two points that took turns met the same machine in a round. Their ratio in each round is free of what both met, so it is
taken first and its rounds are drawn. The rounds of separate measurements are drawn independently.

[Note: equal]
A bootstrap interval of few rounds is too narrow: of n it covers the median with a probability of at most 1 - 2 / 2^n,
which is 97 % for the 6 rounds of measure=standard. A difference of up to EQUAL is therefore no difference, wherever the
interval ends; nobody chooses a setting for it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST = 3  # rounds below which nothing is ranked
EQUAL = 0.01
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
    """The number of a point whose rounds have these medians. See [Note: between rounds]."""
    return _estimate(statistics.median(medians), lambda generator: _drawn(generator, medians))


def ratio_of_turns(one: Sequence[float], other: Sequence[float]) -> RoundsEstimate:
    """one / other of two points that took turns, round by round. See [Note: the same rounds]."""
    return of_rounds([mine / theirs for mine, theirs in zip(one, other, strict=True)])


def ratio_of_separate(one: Sequence[float], other: Sequence[float]) -> RoundsEstimate:
    """one / other of two measurements that shared no rounds."""
    middle = statistics.median(one) / statistics.median(other)
    return _estimate(middle, lambda generator: _drawn(generator, one) / _drawn(generator, other))


def _estimate(middle: float, draw: Callable[[random.Random], float]) -> RoundsEstimate:
    generator = random.Random(SEED)
    low, high = interval([draw(generator) for _ in range(RESAMPLED)])
    return RoundsEstimate(low, middle, high)


def _drawn(generator: random.Random, values: Sequence[float]) -> float:
    return statistics.median(generator.choices(values, k=len(values)))
