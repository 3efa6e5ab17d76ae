"""The number of points is computed before any point is composed, and too many are refused in one line."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.types import FloatRange

from orchestrator.compose.point_count import TooManyPoints, check, of_range


@pytest.mark.parametrize(
    ("start", "stop", "step"),
    [
        (0, 10, 1),
        (0, 10, 3),
        (5, 5, 1),
        (9, 0, 1),
        (9, 0, -2),
        (0, 1, 0.25),
        (1.0, 0.0, -0.3),
        (0, 2.5, 1),
        (0, 7, 2.5),
    ],
)
def test_a_range_is_counted_as_the_values_that_hydra_generates(start: float, stop: float, step: float) -> None:
    whole = all(isinstance(one, int) for one in (start, stop, step))
    values = range(start, stop, step) if whole else FloatRange(start, stop, step)  # type: ignore[arg-type]
    assert of_range(start, stop, step) == len(list(values))


def test_a_range_too_long_to_iterate_is_counted() -> None:
    assert of_range(0, 10**30, 3) == (10**30 + 2) // 3


@pytest.mark.parametrize("given", [(0, float("inf"), 1.0), (float("nan"), 1, 1), (0, 9, 0)])
def test_a_range_without_an_end_or_a_step_is_refused(given: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="expected finite numbers and a step that is not 0"):
        of_range(*given)


def test_too_many_points_are_refused_with_their_number_and_the_flag_that_permits_them() -> None:
    check({"seed": 100, "batch.micro": 100}, 10_000)
    with pytest.raises(TooManyPoints) as told:
        check({"seed": 100, "zero": 1, "batch.micro": 100}, 10_000, more=1)
    assert str(told.value) == (
        "expected a sweep of at most 10,000 points, found 10,001 (100 of seed x 100 of batch.micro + 1 listed); give "
        "fewer values, or ask for so many with --max-points 10001"
    )
