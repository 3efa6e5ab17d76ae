"""The judge of the benchmark of predicted speed, on turns that are drawn: each step has a noise of 12 %, and the
machine's speed changes by a factor of two, for all points alike."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from statistics import NormalDist

import pytest

from benchmarks import paired_turns
from benchmarks.paired_turns import Slower, contenders, final_turns, slower, spread

NOISE, SEEDS = 0.12, 100
TURNS = 13  # of the rounds
STEPS = 4  # of a further turn


def drawn(generator: random.Random, means: Mapping[str, float], count: int, steps: int = 1) -> dict[str, list[float]]:
    """The mean seconds of `steps` steps of each point in `count` turns."""
    found: dict[str, list[float]] = {label: [] for label in means}
    for turn in range(count):
        machine = 1.5 + 0.5 * math.sin(turn / 10)
        for label, mean in means.items():
            noise = sum(generator.lognormvariate(0, NOISE) for _ in range(steps)) / steps
            found[label].append(machine * mean * noise)
    return found


def judged(seed: int, compared: Mapping[str, float]) -> Slower:
    """What is said of the first of the points, from the rounds to the end; four more are far slower."""
    generator, chosen = random.Random(seed), next(iter(compared))
    means = {**compared, **dict.fromkeys("wxyz", 2.0)}
    rounds = drawn(generator, means, TURNS)
    labels, _ = contenders(rounds, chosen)
    count = final_turns(rounds, labels, STEPS)
    if not count:
        return Slower(0.0, 0.0, 0.0, (chosen,))
    return slower(drawn(generator, {label: means[label] for label in labels}, count, STEPS), chosen)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired_turns, "RESAMPLED", 1)  # where only the ratio is of interest


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("points", [2, 4, 8])
def test_the_chosen_of_equal_points_is_within_three_percent_of_the_best(points: int) -> None:
    found = [judged(seed, dict.fromkeys("abcdefgh"[:points], 1.0)).ratio for seed in range(SEEDS)]
    assert sum(one <= 0.03 for one in found) >= 95
    # The standard error of a ratio is about 1.4 %, that of the mean of all 0.14 %: this is four of these.
    assert abs(sum(found)) / SEEDS < 0.0056


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("others", [1, 3, 7])
def test_a_chosen_point_that_is_eight_percent_slower_is_found(others: int) -> None:
    means = {"chosen": 1.08, **dict.fromkeys("abcdefg"[:others], 1.0)}
    found = [judged(seed, means) for seed in range(SEEDS)]
    assert sum(one.ratio > 0.03 for one in found) >= 95
    assert sum(one.ratio for one in found) / SEEDS == pytest.approx(0.08, abs=0.007)
    assert sum("chosen" not in one.best for one in found) >= 95


def test_the_interval_contains_the_true_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired_turns, "RESAMPLED", 200)
    found = [judged(seed, {"chosen": 1.08, "best": 1.0}) for seed in range(40)]
    # Of 40 with a probability of 0.95 each, fewer than 33 are left with one of 0.3 %.
    assert sum(one.low <= 0.08 <= one.high for one in found) >= 33
    assert sum(one.low > 0 for one in found) >= 33


def test_the_truly_fastest_is_a_contender() -> None:
    """It is missed with a probability of 1 % if the others are as fast, and less if they are slower."""
    means = {"best": 1.0, **dict.fromkeys("abcdefghijk", 1.02)}
    found = [contenders(drawn(random.Random(seed), means, TURNS), "a")[0] for seed in range(SEEDS)]
    assert all(labels[0] == "a" for labels in found)
    assert sum("best" in labels for labels in found) >= 97


def test_the_margin_is_the_standard_error_of_a_median_of_ratios_times_a_quantile() -> None:
    """The p10 and p90 of the ratio are 0.9 and 1.1, and one other point may seem faster by chance."""
    ratios = [0.9, 0.9, *[1.0] * 7, 1.1, 1.1]
    turns = {"fast": [1.0, 2.0] * 5 + [1.0], "other": [x * y for x, y in zip(ratios, [1.0, 2.0] * 6, strict=False)]}
    labels, margin = contenders(turns, "fast")
    blom = 2 * NormalDist().inv_cdf((10 - 3 / 8) / (11 + 1 / 4))  # of the second and the tenth of eleven
    assert labels == ["fast", "other"]
    assert margin == pytest.approx(2.3263 * 1.2533 * ((1 / 0.9 - 1 / 1.1) / blom) / math.sqrt(11), rel=1e-3)
    other = turns["other"]
    turns["other"] = [(1 + 0.99 * margin) * one for one in other]
    assert contenders(turns, "fast") == (["fast", "other"], pytest.approx(margin))
    turns["other"] = [(1 + 1.01 * margin) * one for one in other]
    assert contenders(turns, "fast") == (["fast"], pytest.approx(margin))
    assert contenders(turns, "other")[0] == ["other", "fast"]


def test_further_turns_bring_the_median_of_a_contender_to_the_promised_standard_error() -> None:
    """That of a median of normal values is sqrt(pi / 2) of that of their mean. The turns end with a full rotation in
    both halves, also if fewer are asked for."""
    rounds = drawn(random.Random(0), {"a": 1.0, "b": 1.0}, 2000)
    expected = math.pi / 2 * (NOISE / 0.009) ** 2
    assert final_turns(rounds, ["a", "b"], 1) == pytest.approx(expected, rel=0.1)
    assert final_turns(rounds, ["a", "b"], STEPS) == pytest.approx(expected / STEPS, rel=0.15)
    assert final_turns(rounds, ["a", "b"], STEPS, 5) == 8
    assert final_turns(rounds, ["a"], STEPS, 5) == 0


def test_the_spread_of_thirteen_turns_is_that_of_many() -> None:
    generator = random.Random(0)
    few = [spread([generator.gauss(1, NOISE) for _ in range(TURNS)]) for _ in range(1000)]
    assert sum(few) / 1000 == pytest.approx(NOISE, rel=0.04)  # the standard error of this mean is 0.8 %
    assert spread([generator.gauss(1, NOISE) for _ in range(20_000)]) == pytest.approx(NOISE, rel=0.04)
