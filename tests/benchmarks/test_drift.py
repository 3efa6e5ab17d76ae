"""A row whose step time moves over the rounds is reported as drifting; a row that only scatters is not."""

from __future__ import annotations

import random

import pytest

from benchmarks.drift import LEAST_ROUNDS, drift_of, drift_verdict

ROUNDS = 12
STEADY = [1.00, 1.02, 0.99, 1.01, 1.03, 0.98, 1.00, 1.02, 0.99, 1.01, 1.00, 1.02]


def noisy(generator: random.Random, rise: float = 0.0) -> list[float]:
    """Readings of one second with 2 % noise that rise by `rise` seconds in total."""
    return [1 + generator.gauss(0, 0.02) + rise * index / (ROUNDS - 1) for index in range(ROUNDS)]


def test_a_slowdown_from_1_2_to_4_0_s_within_eight_rounds_is_reported_as_drift() -> None:
    drift = drift_of([1.2, 1.3, 1.7, 2.2, 2.6, 3.1, 3.6, 4.0])
    assert drift is not None
    assert drift.found
    assert drift.moved == pytest.approx(3.8 / 1.25 - 1)


def test_a_row_that_becomes_faster_is_reported_as_drift() -> None:
    drift = drift_of([1.5 - 0.05 * index + 0.01 * (index % 2) for index in range(ROUNDS)])
    assert drift is not None
    assert drift.found
    assert drift.moved < 0


def test_a_row_that_only_scatters_is_not_reported_as_drift() -> None:
    drift = drift_of(STEADY)
    assert drift is not None
    assert not drift.found


def test_single_slow_rounds_are_not_reported_as_drift() -> None:
    drift = drift_of([*STEADY[:3], 3.0, *STEADY[4:10], 2.5, STEADY[11]])
    assert drift is not None
    assert not drift.found


def test_noise_is_rarely_called_drift_and_a_rise_of_a_quarter_usually_is() -> None:
    """With this seed 2 and 988 of 1000 rows drift; the assertions are what five standard errors promise."""
    generator = random.Random(0)
    false = sum(drift.found for _ in range(1000) if (drift := drift_of(noisy(generator))))
    true = sum(drift.found for _ in range(1000) if (drift := drift_of(noisy(generator, rise=0.25))))
    assert false < 10
    assert true > 900


def test_any_move_of_a_row_without_spread_is_reported_as_drift() -> None:
    drift = drift_of([1.0] * 6 + [1.1] * 6)
    assert drift is not None
    assert drift.found
    assert drift.explained == 0


def test_too_few_rounds_are_not_judged() -> None:
    assert drift_of(STEADY[: LEAST_ROUNDS - 1]) is None
    assert "not judged" in drift_verdict("step times", {"a": STEADY[:3]})


def test_the_verdict_names_the_rows_that_moved_or_states_that_none_did() -> None:
    calm = drift_verdict("step times", {"a": STEADY, "b": STEADY})
    assert "none of 2 rows moved" in calm
    warned = drift_verdict("step times", {"a": STEADY, "b": [second * (1 + i) for i, second in enumerate(STEADY)]})
    assert "WARNING, 1 of 2 rows moved" in warned
    assert ": b +" in warned


def test_rows_that_scatter_too_much_to_judge_are_reported_with_a_warning() -> None:
    noisy_row = [1.0, 1.9, 0.8, 1.6, 1.1, 2.2, 0.9, 1.5, 1.2, 2.0, 0.8, 1.7]
    verdict = drift_verdict("step times", {"a": STEADY, "b": noisy_row})
    assert "WARNING, 1 of 2 rows scatter too much to tell" in verdict
