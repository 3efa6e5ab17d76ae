"""Numbers from few rounds, and the interval in which each lies. Pure, and the same on every machine.

[Note: between rounds]
The steps of one round share its moment: another program on the machine, a clock, the place of a process in memory. How
much they differ among themselves does not tell how much the next round differs. So the number of a point is the median
of its rounds' medians, and the interval is that of medians of rounds drawn with replacement (a bootstrap). With fewer
than LEAST rounds there is nothing to draw from.

[Note: the same rounds]
Two points that took turns met the same machine in a round. Their ratio in each round is free of what both met, so it is
taken first and its rounds are drawn. The rounds of separate measurements are drawn independently.

[Note: equal speed of the cores]
Within a round the points run one after the other, and cores that are shared with another virtual machine change their
speed within a second. Next to each step a rank times work that is always the same (worker/core_speed.py). If d is the
logarithm of two points' ratio in a round and e that of their reference work, then d = a + b e is fitted to the rounds
by least squares, and a is the logarithm of the ratio at equal speed of the cores: a control variate (Lavenberg and
Welch, A perspective on the use of control variables to increase the efficiency of Monte Carlo simulations, Management
Science 27 (1981), 322-335). It keeps the part 1 - R^2 of the variance. b is not set to 1, because the steps of several
ranks also wait for each other; where the reference tells nothing, b is near 0 and the fit costs a factor of
(n - 2) / (n - 3) in the variance. So it is used from CONTROLLED rounds on.

The reference work may have a speed of its own in each process, for as long as that lives: then the mean of e is that of
the cores and of a difference between the two processes, with the standard deviation OWN. The best linear predictor
takes the part t = s / (s + OWN^2) of the mean of e for the cores', where s is the variance of the mean of the rounds'
e. So a = mean(d) - t b mean(e), and its variance has the further term b^2 t OWN^2. On cores whose speed changes much, t
is near 1; on calm ones the mean of e tells little, and little of it is taken out.

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
CONTROLLED = 6  # rounds below which the reference work is not used
# Of two processes' reference work; an upper bound: benchmarks/core_speed.py shows none beyond what rounds explain.
OWN = 0.007
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


def ratio_of_turns(
    one: Sequence[float], other: Sequence[float], reference: Sequence[float] | None = None
) -> RoundsEstimate:
    """one / other of two points that took turns, round by round. See [Note: the same rounds].

    reference: the ratio of their reference work in each round; see [Note: equal speed of the cores].
    """
    ratios = [mine / theirs for mine, theirs in zip(one, other, strict=True)]
    if reference is None:
        return of_rounds(ratios)
    rounds = list(zip(map(math.log, ratios), map(math.log, reference), strict=True))
    return _estimate(
        math.exp(_at_equal_speed(rounds).mean),
        lambda generator: math.exp(_drawn_at_equal_speed(generator, rounds)),
    )


def ratio_of_separate(one: Sequence[float], other: Sequence[float]) -> RoundsEstimate:
    """one / other of two measurements that shared no rounds."""
    middle = statistics.median(one) / statistics.median(other)
    return _estimate(middle, lambda generator: _drawn(generator, one) / _drawn(generator, other))


class Compared(NamedTuple):
    """Two points by their rounds. ratio: larger / smaller. least: the ratio above which they show a difference."""

    ratio: float
    least: float

    @property
    def differ(self) -> bool:
        return self.ratio > self.least


def compared(
    larger: Sequence[float],
    smaller: Sequence[float],
    *,
    turns: bool,
    rivals: int,
    reference: Sequence[float] | None = None,
) -> Compared:
    """Whether the rounds of two points show that the one is larger by more than EQUAL. See [Note: equal].

    turns: whether the two took turns, so that their rounds belong together; rivals: the points that are held against
    the best one, of which one of these is; reference: as for `ratio_of_turns`.
    """
    above, below = ([math.log(value) for value in side] for side in (larger, smaller))
    if reference is not None:
        found = _at_equal_speed(list(zip(_gaps(above, below), map(math.log, reference), strict=True)))
    else:
        found = _of_turns(_gaps(above, below)) if turns else _welch(above, below)
    spread = student.quantile(1 - MISTAKEN / rivals, found.freedom) * found.error
    return Compared(math.exp(found.mean), (1 + EQUAL) * math.exp(spread))


class _Mean(NamedTuple):
    """A mean of logarithms, its standard error and the degrees of freedom of that."""

    mean: float
    error: float
    freedom: int


def _gaps(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [high - low for high, low in zip(above, below, strict=True)]


def _of_turns(gaps: Sequence[float]) -> _Mean:
    return _Mean(statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1)


def _at_equal_speed(rounds: Sequence[tuple[float, float]]) -> _Mean:
    """The intercept of a line through rounds (d, e). See [Note: equal speed of the cores]."""
    number = len(rounds)
    mean, center = sum(d for d, _ in rounds) / number, sum(e for _, e in rounds) / number
    spread = sum((e - center) ** 2 for _, e in rounds)
    slope = sum((d - mean) * (e - center) for d, e in rounds) / spread if spread else 0.0
    left = sum((d - mean - slope * (e - center)) ** 2 for d, e in rounds) / (number - 2)
    of_mean = spread / (number - 1) / number
    trusted = of_mean / (of_mean + OWN**2)
    leverage = 1 / number + (trusted**2 * center**2 / spread if spread else 0.0)
    variance = left * leverage + slope**2 * trusted * OWN**2
    return _Mean(mean - trusted * slope * center, math.sqrt(variance), number - 2)


def _drawn_at_equal_speed(generator: random.Random, rounds: Sequence[tuple[float, float]]) -> float:
    """The logarithm of the ratio in rounds that are drawn, by two processes that are drawn."""
    own = generator.gauss(0.0, OWN)
    return _at_equal_speed([(d, e + own) for d, e in generator.choices(rounds, k=len(rounds))]).mean


def _welch(above: Sequence[float], below: Sequence[float]) -> _Mean:
    """Of a difference of two means; the degrees of freedom are rounded down."""
    squares = [statistics.variance(side) / len(side) for side in (above, below)]
    total = sum(squares)
    shares = sum(square**2 / (len(side) - 1) for square, side in zip(squares, (above, below), strict=True))
    least = min(len(above), len(below)) - 1  # Welch's are never fewer; rounding could say so
    freedom = max(least, int(total * total / shares)) if shares else least
    return _Mean(statistics.mean(above) - statistics.mean(below), math.sqrt(total), freedom)


def _estimate(middle: float, draw: Callable[[random.Random], float]) -> RoundsEstimate:
    generator = random.Random(SEED)
    low, high = interval([draw(generator) for _ in range(RESAMPLED)])
    return RoundsEstimate(low, middle, high)


def _drawn(generator: random.Random, values: Sequence[float]) -> float:
    return statistics.median(generator.choices(values, k=len(values)))
