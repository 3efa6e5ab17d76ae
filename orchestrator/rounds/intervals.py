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
A difference of up to EQUAL is no difference; nobody chooses a setting for it. Beyond that a point is behind another
only if its rounds show it. The bootstrap does not tell that: its interval lies within the rounds that there are, and
each further point is one more chance to leave an equal one behind. So the question is answered by Student's t of the
logarithms of the ratios (Welch's, with his degrees of freedom, for separate measurements), and a sweep makes as many
such comparisons as it has rivals of the best point: each has its part of MISTAKEN (Bonferroni). Ratios under a changing
load have longer tails than normal ones, with which t declares less, not more.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from orchestrator.rounds import student

LEAST = 3  # rounds below which nothing is ranked
EQUAL = 0.01
MISTAKEN = 0.01  # probability that a sweep calls any point slower than the best one that is not
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


def shows_difference(larger: Sequence[float], smaller: Sequence[float], *, turns: bool, rivals: int) -> bool:
    """Whether the rounds of two points show that the one is larger by more than EQUAL. See [Note: equal].

    turns: whether the two took turns, so that their rounds belong together; rivals: the points that are held against
    the best one, of which one of these is.
    """
    above, below = ([math.log(value) for value in side] for side in (larger, smaller))
    if turns:
        gaps = [high - low for high, low in zip(above, below, strict=True)]
        error, freedom = statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1
    else:
        error, freedom = _welch(above, below)
    gap = statistics.mean(above) - statistics.mean(below)
    return gap - student.quantile(1 - MISTAKEN / rivals, freedom) * error > math.log(1 + EQUAL)


def _welch(*sides: Sequence[float]) -> tuple[float, int]:
    """The standard error of a difference of two means, and its degrees of freedom, rounded down."""
    squares = [statistics.variance(side) / len(side) for side in sides]
    total = sum(squares)
    shares = sum(square * square / (len(side) - 1) for square, side in zip(squares, sides, strict=True))
    least = min(len(side) for side in sides) - 1  # Welch's are never fewer; rounding could say so
    return math.sqrt(total), max(least, int(total * total / shares)) if shares else least


def _estimate(middle: float, draw: Callable[[random.Random], float]) -> RoundsEstimate:
    generator = random.Random(SEED)
    low, high = interval([draw(generator) for _ in range(RESAMPLED)])
    return RoundsEstimate(low, middle, high)


def _drawn(generator: random.Random, values: Sequence[float]) -> float:
    return statistics.median(generator.choices(values, k=len(values)))
