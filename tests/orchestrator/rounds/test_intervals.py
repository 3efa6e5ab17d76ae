"""The number of a point with few rounds: what its interval contains, and that it is the same on every machine."""

from __future__ import annotations

import random
import statistics

from orchestrator.rounds.intervals import RoundsEstimate, of_rounds, percentile

SIX = [101.0, 99.0, 100.0, 104.0, 98.0, 100.5]
TRIES = 300


def test_the_number_of_a_point_is_the_median_of_its_rounds_and_its_interval_is_always_the_same() -> None:
    found = of_rounds(SIX)
    assert found == of_rounds(SIX)
    assert found == RoundsEstimate(98.5, 100.25, 102.5)
    assert of_rounds([7.0]) == RoundsEstimate(7.0, 7.0, 7.0)


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
