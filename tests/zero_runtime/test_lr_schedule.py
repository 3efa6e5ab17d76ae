"""Learning rates at the corners of each schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_runtime.errors import PlanError
from zero_runtime.lr_schedule import KINDS, LrSchedule

PEAK = 0.5  # a power of two: products with it are exact
COSINE = LrSchedule("cosine", PEAK, total_steps=13, warmup_steps=4, min_ratio=0.25)


def test_constant_is_the_peak_from_the_first_step_on() -> None:
    schedule = LrSchedule("constant", PEAK, total_steps=10, warmup_steps=5)
    assert {schedule.rate(step) for step in range(20)} == {PEAK}


def test_warmup_rises_by_equal_parts_from_one_part_to_the_peak_and_stays() -> None:
    schedule = LrSchedule("warmup", PEAK, total_steps=10, warmup_steps=4)
    assert [schedule.rate(step) for step in range(7)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5]
    assert schedule.rate(10**6) == PEAK


def test_cosine_begins_with_the_same_warmup() -> None:
    assert [COSINE.rate(step) for step in range(4)] == [0.125, 0.25, 0.375, 0.5]


def test_cosine_has_its_peak_its_middle_and_its_floor_where_promised() -> None:
    assert COSINE.rate(4) == PEAK  # cos 0 is 1 exactly
    # cos(pi/2) in doubles is 6.1e-17 and not 0, which 2^-53 of the value covers.
    assert COSINE.rate(8) == pytest.approx(PEAK * (0.25 + 0.75 / 2), rel=2**-53, abs=0)
    assert COSINE.rate(12) == PEAK * 0.25  # the last of 13 updates; cos pi is -1 exactly


def test_cosine_stays_at_its_floor_after_the_last_step() -> None:
    assert COSINE.rate(13) == COSINE.rate(10**6) == PEAK * 0.25


def test_cosine_never_rises_after_the_warmup() -> None:
    rates = [COSINE.rate(step) for step in range(4, 20)]
    assert rates == sorted(rates, reverse=True)


def test_a_cosine_to_nothing_ends_at_nothing() -> None:
    assert LrSchedule("cosine", PEAK, total_steps=5).rate(4) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_no_warmup_starts_at_the_peak(kind: str) -> None:
    assert LrSchedule(kind, PEAK, total_steps=10).rate(0) == PEAK


@pytest.mark.parametrize("total_steps", [1, 4, 5])
def test_a_cosine_with_no_steps_left_after_the_warmup_does_not_divide_by_zero(total_steps: int) -> None:
    schedule = replace(COSINE, total_steps=total_steps)
    assert schedule.rate(3) == schedule.rate(4) == PEAK
    assert schedule.rate(5) == PEAK * 0.25


def test_an_unknown_kind_is_refused_with_the_choices() -> None:
    with pytest.raises(PlanError, match=r"scheduler\.kind: expected one of .*cosine.*, found 'linear'"):
        LrSchedule("linear", PEAK, total_steps=1)


@pytest.mark.parametrize("wrong", [{"peak_lr": -1.0}, {"warmup_steps": -1}, {"min_ratio": -0.1}, {"min_ratio": 1.1}])
def test_a_value_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=str(next(iter(wrong.values())))):
        replace(COSINE, **wrong)
