"""The loss scale follows the published rule at every step."""

from __future__ import annotations

import random

import pytest

from zero_runtime.errors import PlanError
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule


def published_trace(rule: LossScaleRule, overflows: list[bool]) -> list[float]:
    """An independent second implementation of the rule, with the variables of DeepSpeed 0.19.8."""
    scale, left, last = 2.0**rule.initial_power, rule.hysteresis, -1
    scales = []
    for iteration, overflow in enumerate(overflows):
        scales.append(scale)
        if overflow:
            if left == 1:
                scale = max(scale / 2, rule.minimum)
            else:
                left -= 1
            last = iteration
            continue
        if rule.consecutive_hysteresis:
            left = rule.hysteresis
        stable = iteration - last - 1
        if stable > 0 and stable % rule.window == 0:
            if not rule.consecutive_hysteresis:
                left = rule.hysteresis
            scale *= 2
    return scales


def trace(rule: LossScaleRule, overflows: list[bool]) -> list[float]:
    scaler, scales = rule.start(), []
    for overflow in overflows:
        scales.append(scaler.scale)
        scaler = scaler.after(overflow=overflow)
    return scales


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_scale_follows_the_published_rule_for_any_overflows(
    window: int, hysteresis: int, consecutive: bool
) -> None:
    rule = LossScaleRule(
        initial_power=10, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, minimum=4.0
    )
    drawn = random.Random(window * 100 + hysteresis)
    for chance in (0.1, 0.5, 0.9):
        overflows = [drawn.random() < chance for _ in range(200)]
        assert trace(rule, overflows) == published_trace(rule, overflows)


def test_with_hysteresis_2_the_first_overflow_is_tolerated_and_the_second_halves_the_scale() -> None:
    assert trace(LossScaleRule(initial_power=4), [True, True, True, False]) == [16, 16, 8, 4]


def test_the_scale_doubles_at_the_good_step_after_each_window() -> None:
    """The scales after each step are those of DeepSpeed 0.19.8's DynamicLossScaler."""
    assert trace(LossScaleRule(initial_power=0, window=3), [False] * 9) == [1, 1, 1, 1, 2, 2, 2, 4, 4]
    overflows = [False, False, True, True, False, False, False, False]
    assert trace(LossScaleRule(initial_power=4, window=2), overflows) == [16, 16, 16, 16, 8, 8, 8, 16]


def test_the_scale_stops_at_its_minimum_and_is_then_exhausted() -> None:
    scaler = LossScaleRule(initial_power=2, hysteresis=1, minimum=2.0).start()
    assert not scaler.exhausted
    scaler = scaler.after(overflow=True)
    assert scaler.scale == 2
    assert scaler.exhausted
    assert scaler.after(overflow=True).scale == 2


def test_a_static_scale_never_changes_and_a_scale_of_one_is_exhausted() -> None:
    assert trace(LossScaleRule(static=128.0), [True, False] * 3) == [128.0] * 6
    assert UNSCALED.start().exhausted


@pytest.mark.parametrize(
    "values",
    [
        {"window": 0},
        {"hysteresis": 0},
        {"minimum": 0.0},
        {"static": float("inf")},
        {"initial_power": 0, "minimum": 8.0},
    ],
)
def test_an_invalid_rule_is_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=r"precision\.\w+ must be"):
        LossScaleRule(**values)
