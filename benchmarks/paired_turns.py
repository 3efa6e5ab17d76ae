"""How much slower one point is than the fastest of several, from turns in which each makes its steps. Pure.

Turns are given as the seconds of each point by its label, per token or per step, in the same order of turns for all.

[Note: contenders]
The fastest of many noisy medians is fast in part by chance, and the turns that named it must not judge it. So the turns
of the rounds only name the contenders: the chosen point, and those that may be the fastest. With n turns, a median of
turn-by-turn ratios whose spread is s has a standard error of sqrt(pi / 2) * s / sqrt(n); s is the median of all pairs.
The truly fastest of P points is missed only if one of the P - 1 others seems faster by more than the margin. The margin
is that standard error times the normal quantile of 1 - MISSED / (P - 1), so all of them together miss it with a
probability of at most MISSED.

[Note: two halves]
The contenders make further turns, which are split in two halves. The best in one half is judged by the other, and the
reverse, so no turn judges a point that it has picked. The mean of both is 0 on average if the points are equally fast.
If several differ by less than the noise, the one picked may not be the truly fastest, and the mean is too small by at
most that difference.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from orchestrator.rounds.intervals import RESAMPLED, SEED, interval

Turns = Mapping[str, Sequence[float]]

MISSED = 0.01  # the probability that the truly fastest point is no contender
# Relative standard error of the median of a contender's further turns. That of a ratio of two is 1.3 %, so that the
# limit of 3 % of the benchmark is more than two standard errors.
PRECISION = 0.009
OF_MEDIAN = math.sqrt(math.pi / 2)  # the standard error of a median, relative to that of a mean; normal values


class Slower(NamedTuple):
    """By how much more time the chosen point takes than the best (0.03: 3 %), with its bootstrap interval; and the
    best by each half of the turns, once if both have the same."""

    ratio: float
    low: float
    high: float
    best: tuple[str, ...]


def spread(values: Sequence[float]) -> float:
    """The standard deviation, relative to the median, of a normal distribution with this p10 and p90: (p90 - p10) /
    2.56 for many values, and for few by how far apart these two are expected (Blom's quantiles of ordered values)."""
    ordered, count = sorted(values), len(values)
    high = round(0.9 * (count - 1))
    expected = 2 * statistics.NormalDist().inv_cdf((high + 0.625) / (count + 0.25))
    return (ordered[high] - ordered[count - 1 - high]) / expected / statistics.median(ordered)


def typical_spread(turns: Turns) -> float:
    """That of turn-by-turn ratios: the median of all pairs of at least two points."""
    return statistics.median(spread(_ratios(turns, one, other)) for one, other in combinations(turns, 2))


def contenders(turns: Turns, chosen: str) -> tuple[list[str], float]:
    """The labels of the contenders, the chosen one first, and the margin; see [Note: contenders]."""
    fastest = min(turns, key=lambda label: statistics.median(turns[label]))
    ratios = {label: _ratios(turns, label, fastest) for label in turns if label != fastest}
    if not ratios:
        return [chosen], 0.0
    quantile = statistics.NormalDist().inv_cdf(1 - MISSED / len(ratios))
    margin = quantile * OF_MEDIAN * typical_spread(turns) / math.sqrt(len(turns[fastest]))
    near = [label for label in turns if label == fastest or statistics.median(ratios[label]) <= 1 + margin]
    return [chosen, *(label for label in near if label != chosen)], margin


def final_turns(turns: Turns, labels: Sequence[str], steps: int, most: int | None = None) -> int:
    """How many further turns of `steps` steps these contenders make; 0 if there is one.

    turns: of all points, of one step. With this number a contender's median has the standard error PRECISION, unless
    `most` is less. It is rounded up so that in both halves each contender begins equally many turns.

    The spread of a point's step is that of the ratio of two over sqrt(2), without what both share; that of the mean of
    several steps is smaller by the root of their number, as steps that are disturbed independently are.
    """
    if len(labels) == 1:
        return 0
    count = (OF_MEDIAN * typical_spread(turns) / math.sqrt(2 * steps) / PRECISION) ** 2
    count = count if most is None else min(count, most)
    both = 2 * len(labels)
    return max(math.ceil(count / both), 1) * both


def slower(turns: Turns, chosen: str) -> Slower:
    """By how much the chosen point is slower than the best, see [Note: two halves].

    turns: those of `final_turns`. A half consists of every other rotation of the contenders. The interval is that of
    means whose turns are drawn with replacement in each half, with the best picked again in each.
    """
    ratios = {label: _ratios(turns, chosen, label) for label in (chosen, *(one for one in turns if one != chosen))}
    numbers = range(len(turns[chosen]))
    halves = [[number for number in numbers if number // len(turns) % 2 == half] for half in (0, 1)]
    mean, best = _judged(ratios, *halves)
    generator = random.Random(SEED)
    drawn = [_judged(ratios, *(generator.choices(half, k=len(half)) for half in halves))[0] for _ in range(RESAMPLED)]
    return Slower(mean, *interval(drawn), best)


def _judged(ratios: Turns, first: Sequence[int], second: Sequence[int]) -> tuple[float, tuple[str, ...]]:
    """The mean of what each half says about the best of the other, less 1, and the best of both. ratios: by how much
    each point is faster than the chosen one."""
    medians = [
        {label: statistics.median(values[number] for number in half) for label, values in ratios.items()}
        for half in (first, second)
    ]
    picked = [max(half, key=half.__getitem__) for half in medians]
    mean = (medians[1][picked[0]] + medians[0][picked[1]]) / 2 - 1
    return mean, tuple(dict.fromkeys(picked))


def _ratios(turns: Turns, label: str, other: str) -> list[float]:
    return [mine / theirs for mine, theirs in zip(turns[label], turns[other], strict=True)]
