"""Whether one point is slower than another: the ratio of their times and the interval in which it lies. Pure.

This is the only rule: for the ties of a sweep, for `compare`, `choose`, costs and anchors. A point is slower if its
rounds show that it is, and by more than what counts as equal: the interval of the ratio leaves out 1, and the ratio
itself is above 1 + `equal`. The interval is that of Student's t for the logarithms of the ratios (Welch's, with his
degrees of freedom, for separate measurements).

[Note: equal speed of the cores]
Within a round the points run one after the other, and cores that are shared with another virtual machine change their
speed within a second. Next to each step a rank times work that is always the same (worker/core_speed.py). If d is the
logarithm of two points' ratio in a round and e that of their reference work, then d = a + b e is fitted to the rounds
by least squares, and a is the logarithm of the ratio at equal speed of the cores: a control variate (Lavenberg and
Welch, A perspective on the use of control variables to increase the efficiency of Monte Carlo simulations, Management
Science 27 (1981), 322-335). It keeps the part 1 - R^2 of the variance. b is not set to 1, because the steps of several
ranks also wait for each other; where the reference tells nothing, b is near 0 and the fit costs a factor of
(n - 2) / (n - 3) in the variance. So it is used from CONTROLLED rounds on, and not where the cores kept one speed. The
reference work has no speed of its own in a process: benchmarks/core_speed.py finds no more difference between processes
than their rounds explain.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from orchestrator.rounds import recorded, student
from orchestrator.rounds.intervals import LEAST

EQUAL = 0.01  # nobody chooses a setting for a difference of up to this
MOST_ROUNDS = 1000  # that are proposed
MISTAKEN = 0.01  # probability that a family calls any point slower that is not
RANGE = f"{100 * (1 - 2 * MISTAKEN):g} % range"  # of a ratio that has no family


class SpeedVerdict(Enum):
    """What a comparison shows of its first point."""

    slower = "slower"
    faster = "faster"
    same = "same"
    unclear = "unclear"  # the interval holds both 1 and a difference that should be found


class Comparison(NamedTuple):
    """The time of one point by that of another, with its interval. It is one of `family`, of this many rounds."""

    ratio: float
    low: float
    high: float
    equal: float = EQUAL
    family: int = 1
    rounds: int = LEAST

    @property
    def verdict(self) -> SpeedVerdict:
        """A difference of twice `equal` is found about as surely as none is reported, and `same` excludes it."""
        line, found = 1 + self.equal, 1 + 2 * self.equal
        if self.low > 1 and self.ratio > line:
            return SpeedVerdict.slower
        if self.high < 1 and self.ratio < 1 / line:
            return SpeedVerdict.faster
        return SpeedVerdict.same if 1 / found < self.low and self.high < found else SpeedVerdict.unclear

    @property
    def hidden(self) -> float:
        """The relative difference up to which these rounds would show none."""
        return max(self.equal, self.ratio / self.low - 1)

    def more_rounds(self, shown: float) -> int:
        """How many more such rounds show a relative difference of `shown`; at most MOST_ROUNDS."""
        asked = math.log1p(shown) / math.log(self.ratio / self.low) if self.low < self.ratio else math.inf

        def narrows(more: int) -> bool:
            rounds = self.rounds + more
            return _width(rounds - 1, self.family, rounds) <= asked * _width(self.rounds - 1, self.family, self.rounds)

        return bisect.bisect_left(range(MOST_ROUNDS), True, lo=1, key=narrows)

    def times(self, factor: float) -> Comparison:
        """This comparison, scaled to a quantity proportional to time, such as a price."""
        return self._replace(ratio=self.ratio * factor, low=self.low * factor, high=self.high * factor)


def compare(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    times: Callable[[Mapping[str, Any]], Sequence[float]] = recorded.ms_per_token,
    *,
    family: int = 1,
    equal: float = EQUAL,
) -> Comparison:
    """The time of one result by that of another; each has at least LEAST rounds. times: of a result, in each round.

    family: how many points are held against one, of which this is one; equal: up to which difference it is none.
    """
    # Two points that took turns met the same machine in a round: their ratio in each round is free of what both met.
    pair = recorded.in_turns(one, other)
    if pair is None:  # the rounds of separate measurements are independent
        sides = [list(map(math.log, times(result))) for result in (one, other)]
        return _comparison(_welch(*sides), family, equal, min(map(len, sides)))
    return of_turns(times(pair.one), times(pair.other), pair.reference, family=family, equal=equal)


def of_turns(
    one: Sequence[float],
    other: Sequence[float],
    reference: Sequence[float] | None = None,
    *,
    family: int = 1,
    equal: float = EQUAL,
) -> Comparison:
    """The same from the times of rounds in which both took turns. reference: the ratio of their reference work in each
    round; see [Note: equal speed of the cores]."""
    gaps = [math.log(mine / theirs) for mine, theirs in zip(one, other, strict=True)]
    cores = list(map(math.log, reference or ()))
    # Decided by the reference work alone, so that the choice does not favour a result.
    found = _at_equal_speed(gaps, cores) if cores and statistics.stdev(cores) > EQUAL else _of_turns(gaps)
    return _comparison(found, family, equal, len(gaps))


class _Mean(NamedTuple):
    """A mean of logarithms, its standard error and the degrees of freedom of that."""

    mean: float
    error: float
    freedom: int


def _comparison(found: _Mean, family: int, equal: float, rounds: int) -> Comparison:
    # Student's t, because a bootstrap of few rounds lies within the rounds that there are. Under a changing load ratios
    # have longer tails than normal ones, with which t declares less, not more. Each further point of a family is one
    # more chance to leave an equal one behind, so each has its part of MISTAKEN (Bonferroni).
    spread = student.quantile(1 - MISTAKEN / family, found.freedom) * found.error
    ratio, low, high = (math.exp(found.mean + part * spread) for part in (0, -1, 1))
    return Comparison(ratio, low, high, equal, family, rounds)


def _width(freedom: int, family: int, rounds: int) -> float:
    """How wide an interval of so many rounds is, up to a factor."""
    return student.quantile(1 - MISTAKEN / family, freedom) / math.sqrt(rounds)


def _of_turns(gaps: Sequence[float]) -> _Mean:
    return _Mean(statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1)


def _at_equal_speed(gaps: Sequence[float], cores: Sequence[float]) -> _Mean:
    """The intercept of a line through rounds (d, e). See [Note: equal speed of the cores]."""
    number, mean, center = len(gaps), statistics.mean(gaps), statistics.mean(cores)
    spread = sum((e - center) ** 2 for e in cores)
    slope = sum((d - mean) * (e - center) for d, e in zip(gaps, cores, strict=True)) / spread if spread else 0.0
    left = sum((d - mean - slope * (e - center)) ** 2 for d, e in zip(gaps, cores, strict=True)) / (number - 2)
    leverage = 1 / number + (center**2 / spread if spread else 0.0)
    return _Mean(mean - slope * center, math.sqrt(left * leverage), number - 2)


def _welch(above: Sequence[float], below: Sequence[float]) -> _Mean:
    """Of a difference of two means; the degrees of freedom are rounded down."""
    squares = [statistics.variance(side) / len(side) for side in (above, below)]
    total = sum(squares)
    shares = sum(square**2 / (len(side) - 1) for square, side in zip(squares, (above, below), strict=True))
    least = min(len(above), len(below)) - 1  # Welch's are never fewer; rounding could say so
    freedom = max(least, int(total * total / shares)) if shares else least
    return _Mean(statistics.mean(above) - statistics.mean(below), math.sqrt(total), freedom)
