"""The number of points is computed before any point is composed, and too many are refused in one line."""

from __future__ import annotations

import pytest

from orchestrator.compose.point_count import TooManyPoints, check


def test_too_many_points_are_refused_with_their_number_and_the_flag_that_permits_them() -> None:
    check([("seed", 100), ("batch.micro", 100)], 10_000)
    with pytest.raises(TooManyPoints) as told:
        check([("seed", 100), ("zero", 1), ("batch.micro", 100)], 10_000, more=1)
    assert str(told.value) == (
        "expected a sweep of at most 10,000 points, found 10,001 (100 of seed x 100 of batch.micro + 1 listed); give "
        "fewer values, or allow more with --max-points N"
    )
