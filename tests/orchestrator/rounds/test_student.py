"""Quantiles of Student's t are those of the printed tables."""

from __future__ import annotations

import pytest

from orchestrator.rounds.student import quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        (0.95, 1, 6.314),
        (0.995, 2, 9.925),
        (0.975, 3, 3.182),
        (0.9, 4, 1.533),
        (0.975, 5, 2.571),
        (0.9995, 5, 6.869),
        (0.99, 10, 2.764),
        (0.975, 60, 2.000),
    ],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert quantile(probability, freedom) == pytest.approx(expected, abs=5e-4)


def test_half_of_the_distribution_is_below_zero() -> None:
    assert quantile(0.5, 7) == 0.0
