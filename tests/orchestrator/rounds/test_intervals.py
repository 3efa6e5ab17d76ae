"""Intervals of few rounds: what they contain, and that they are the same on every machine."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from orchestrator.rounds import student
from orchestrator.rounds.intervals import (
    MISTAKEN,
    OWN,
    RoundsEstimate,
    _at_equal_speed,
    compared,
    of_rounds,
    percentile,
    ratio_of_separate,
    ratio_of_turns,
)

SIX = [101.0, 99.0, 100.0, 104.0, 98.0, 100.5]
TRIES = 300


def shows_difference(*sides: list[float], **asked: Any) -> bool:
    return compared(*sides, **asked).differ


def test_the_number_of_a_point_is_the_median_of_its_rounds_and_its_interval_is_always_the_same() -> None:
    found = of_rounds(SIX)
    assert found == of_rounds(SIX)
    assert found == RoundsEstimate(98.5, 100.25, 102.5)
    assert of_rounds([7.0]) == RoundsEstimate(7.0, 7.0, 7.0)


def test_what_both_points_met_in_a_round_is_not_in_their_ratio() -> None:
    weather = [1.0, 1.4, 0.8, 2.0, 1.1, 1.3]
    one, other = [102 * each for each in weather], [100 * each for each in weather]
    assert ratio_of_turns(one, other) == pytest.approx((1.02, 1.02, 1.02))
    separate = ratio_of_separate(one, other)
    assert separate.middle == pytest.approx(1.02)
    assert separate.low < 0.8 < 1.2 < separate.high


def test_the_speed_of_the_cores_is_not_in_a_ratio_with_reference_work() -> None:
    generator = random.Random(4)
    reference = [generator.choice([0.7, 1.0, 1.4]) for _ in range(24)]
    one = [1.05 * each**0.9 for each in reference]
    found = ratio_of_turns(one, [1.0] * 24, reference)
    logs = [math.log(each) for each in reference]
    trusted = 1 - OWN**2 / (statistics.variance(logs) / 24 + OWN**2)
    assert trusted > 0.98
    assert found.middle == pytest.approx(1.05 * math.exp((1 - trusted) * 0.9 * statistics.mean(logs)))
    assert 1.03 < found.low < 1.05 < found.high < 1.07, "what the two processes may have of their own is left"
    assert ratio_of_turns(one, [1.0] * 24).low < 1.0
    assert shows_difference(one, [1.0] * 24, turns=True, rivals=1, reference=reference)
    assert not shows_difference(one, [1.0] * 24, turns=True, rivals=1)
    assert ratio_of_turns([1.1] * 6, [1.0] * 6, [1.0] * 6) == pytest.approx((1.1, 1.1, 1.1)), "cores at one speed"


@pytest.mark.parametrize("cores", [0.01, 0.03, 0.15])
def test_what_reference_work_has_of_its_own_in_a_process_is_not_taken_for_the_speed_of_its_core(cores: float) -> None:
    """The speed of the cores changes by `cores` from round to round, and each step by 2 % for itself."""
    generator = random.Random(7)
    wrong, squares = 0, {"trusting some": 0.0, "trusting all": 0.0, "trusting nothing": 0.0}
    for _ in range(10 * TRIES):
        own = generator.gauss(0, OWN)
        speeds = [generator.gauss(0, cores) for _ in range(24)]
        steps = [speed + generator.gauss(0, 0.02) for speed in speeds]
        reference = [speed + own for speed in speeds]
        found = _at_equal_speed(list(zip(steps, reference, strict=True)))
        wrong += found.mean > student.quantile(1 - MISTAKEN, found.freedom) * found.error
        squares["trusting some"] += found.mean**2
        squares["trusting all"] += statistics.linear_regression(reference, steps).intercept ** 2
        squares["trusting nothing"] += statistics.mean(steps) ** 2
    assert squares["trusting some"] < 1.02 * min(squares.values())
    assert wrong <= 10 * MISTAKEN * TRIES + 4 * (10 * MISTAKEN * TRIES) ** 0.5


def test_reference_work_that_tells_nothing_makes_no_equal_points_differ() -> None:
    generator = random.Random(5)
    wrong = 0
    for _ in range(TRIES):
        one, other, reference = ([math.exp(generator.gauss(0, 0.1)) for _ in range(6)] for _ in range(3))
        wrong += shows_difference(one, other, turns=True, rivals=1, reference=reference)
    # Four standard deviations above the probability MISTAKEN are not seen by chance.
    assert wrong <= MISTAKEN * TRIES + 4 * (MISTAKEN * TRIES) ** 0.5


def test_the_interval_with_reference_work_contains_the_true_ratio_about_as_often_as_it_says() -> None:
    generator = random.Random(6)
    contained = 0
    for _ in range(TRIES // 3):  # a bootstrap of fits each
        reference = [math.exp(generator.gauss(0, 0.2)) for _ in range(24)]
        one = [1.05 * each * math.exp(generator.gauss(0, 0.05)) for each in reference]
        found = ratio_of_turns(one, [1.0] * 24, reference)
        contained += found.low <= 1.05 <= found.high
    # A bootstrap of 24 rounds is narrower than the truth by about 1 - sqrt(22 / 24), so 93 % are expected, not 95.
    assert contained >= 0.93 * 100 - 4 * (0.93 * 0.07 * 100) ** 0.5


def test_rounds_of_different_points_have_to_be_as_many_to_be_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio_of_turns(SIX, SIX[:5])


def test_the_interval_of_six_rounds_contains_the_true_median_about_as_often_as_it_says() -> None:
    generator = random.Random(1)
    drawn = [[generator.gauss(100, 3) for _ in range(6)] for _ in range(TRIES)]
    contained = sum(found.low <= 100 <= found.high for found in map(of_rounds, drawn))
    # All six are on one side of the median with a probability of 2 / 2^6, 3 %: no interval within them covers more.
    assert 0.85 * TRIES <= contained <= 0.97 * TRIES + 4 * (0.03 * 0.97 * TRIES) ** 0.5


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile(SIX, 0.5) in SIX
    assert (percentile(SIX, 0.0), percentile(SIX, 1.0)) == (min(SIX), max(SIX))
    assert statistics.median(SIX) == 100.25


def leaves_one_behind(generator: random.Random, speeds: list[float], noise: float) -> bool:
    """Whether a sweep of points with these speeds calls one of them slower than the best; each has six rounds."""
    points = [[speed * math.exp(generator.gauss(0, noise)) for _ in range(6)] for speed in speeds]
    best, *others = sorted(points, key=statistics.median, reverse=True)
    return any(shows_difference(best, other, turns=True, rivals=len(others)) for other in others)


def test_equal_points_stay_a_tie_however_much_their_rounds_differ() -> None:
    generator = random.Random(2)
    broken = sum(leaves_one_behind(generator, [1.0] * 4, 0.14) for _ in range(TRIES))
    # Each rival of the best is called slower with a probability of MISTAKEN / 3, or of twice that because the best is
    # chosen after the measurement. Four standard deviations more are not seen by chance.
    expected = 2 * MISTAKEN * TRIES
    assert broken <= expected + 4 * expected**0.5


def test_a_point_that_is_slower_is_not_in_the_tie() -> None:
    generator = random.Random(3)
    assert all(leaves_one_behind(generator, [1.0, 0.95], 0.01) for _ in range(TRIES))


def test_more_rivals_ask_for_more_evidence() -> None:
    faster, slower = [1.030, 1.055, 1.025, 1.060, 1.040, 1.045], [1.0] * 6
    assert shows_difference(faster, slower, turns=True, rivals=1)
    assert not shows_difference(faster, slower, turns=True, rivals=50)


def test_rounds_that_were_not_shared_need_a_larger_difference_than_shared_ones() -> None:
    weather = [1.0, 1.4, 0.8, 2.0, 1.1, 1.3]
    one, other = [103 * each for each in weather], [100 * each for each in weather]
    assert shows_difference(one, other, turns=True, rivals=3)
    assert not shows_difference(one, other, turns=False, rivals=3)
    assert shows_difference([20 * each for each in one], other, turns=False, rivals=3)
    assert shows_difference([2.0] * 3, [1.0] * 3, turns=False, rivals=1), "rounds without any spread"


@pytest.mark.parametrize("more", [1.002, 0.998])
def test_a_ratio_just_above_the_least_one_shows_and_one_just_below_does_not(more: float) -> None:
    generator = random.Random(11)
    one = [100 * math.exp(generator.gauss(0.0, 0.05)) for _ in range(12)]
    other = [100.0] * 12
    found = compared(one, other, turns=True, rivals=3)
    scale = more * found.least / found.ratio  # a common factor of all rounds changes no spread
    again = compared([scale * each for each in one], other, turns=True, rivals=3)
    assert again.least == pytest.approx(found.least)
    assert again.differ == (more > 1)
