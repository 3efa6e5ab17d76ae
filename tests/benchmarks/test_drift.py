"""A row whose step time moves over the rounds is found, one that only scatters is not."""

from __future__ import annotations

import random

import pytest

from benchmarks.drift import LEAST_ROUNDS, drift_of, drift_verdict

ROUNDS = 12
STEADY = [1.00, 1.02, 0.99, 1.01, 1.03, 0.98, 1.00, 1.02, 0.99, 1.01, 1.00, 1.02]


def noisy(generator: random.Random, rise: float = 0.0) -> list[float]:
    """One second with 2 % of noise, rising by `rise` seconds in all."""
    return [1 + generator.gauss(0, 0.02) + rise * index / (ROUNDS - 1) for index in range(ROUNDS)]


def test_the_step_that_slowed_from_1_2_to_4_0_s_within_eight_rounds_is_found() -> None:
    drift = drift_of([1.2, 1.3, 1.7, 2.2, 2.6, 3.1, 3.6, 4.0])
    assert drift is not None
    assert drift.found
    assert drift.moved == pytest.approx(3.8 / 1.25 - 1)


def test_a_row_that_becomes_faster_is_found_too() -> None:
    drift = drift_of([1.5 - 0.05 * index + 0.01 * (index % 2) for index in range(ROUNDS)])
    assert drift is not None
    assert drift.found
    assert drift.moved < 0


def test_a_row_that_only_scatters_is_not_found() -> None:
    drift = drift_of(STEADY)
    assert drift is not None
    assert not drift.found


def test_single_slow_rounds_are_no_drift() -> None:
    drift = drift_of([*STEADY[:3], 3.0, *STEADY[4:10], 2.5, STEADY[11]])
    assert drift is not None
    assert not drift.found


def test_noise_is_seldom_called_drift_and_a_rise_of_a_quarter_mostly() -> None:
    """Found with this seed: 2 of 1000 and 988 of 1000. What is asserted is what the choice of five errors promises."""
    generator = random.Random(0)
    false = sum(drift.found for _ in range(1000) if (drift := drift_of(noisy(generator))))
    true = sum(drift.found for _ in range(1000) if (drift := drift_of(noisy(generator, rise=0.25))))
    assert false < 10
    assert true > 900


def test_rows_without_any_spread_drift_by_what_they_moved() -> None:
    drift = drift_of([1.0] * 6 + [1.1] * 6)
    assert drift is not None
    assert drift.found
    assert drift.explained == 0


def test_too_few_rounds_are_not_judged() -> None:
    assert drift_of(STEADY[: LEAST_ROUNDS - 1]) is None
    assert "not judged" in drift_verdict("step times", {"a": STEADY[:3]})


def test_the_verdict_is_given_whether_or_not_a_row_moved() -> None:
    calm = drift_verdict("step times", {"a": STEADY, "b": STEADY})
    assert "none of 2 rows moved" in calm
    warned = drift_verdict("step times", {"a": STEADY, "b": [second * (1 + i) for i, second in enumerate(STEADY)]})
    assert "WARNING, 1 of 2 rows moved" in warned
    assert ": b +" in warned


def test_rows_that_scatter_too_much_to_tell_are_not_called_steady() -> None:
    noisy_row = [1.0, 1.9, 0.8, 1.6, 1.1, 2.2, 0.9, 1.5, 1.2, 2.0, 0.8, 1.7]
    verdict = drift_verdict("step times", {"a": STEADY, "b": noisy_row})
    assert "WARNING, 1 of 2 rows scatter too much to tell" in verdict
