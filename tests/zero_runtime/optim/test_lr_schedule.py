"""Each schedule gives the rates of its published formula, which the tests write out."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zero_runtime.errors import PlanError
from zero_runtime.optim.lr_schedule import (
    Constant,
    Cosine,
    LRRangeTest,
    LrSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

ROOT = Path(__file__).resolve().parents[3]


def rates_of(schedule: LrSchedule, updates: int) -> list[float]:
    found = [schedule.rates(made).lr for made in range(updates)]
    assert all(isinstance(lr, float) for lr in found)
    return found  # type: ignore[return-value]


def approx(values: list[float]) -> object:
    """Equal up to a few roundings of fp64, because the terms are written in a different order."""
    return pytest.approx(values, rel=8 * 2.0**-53, abs=1e-18)


def test_constant_and_cosine_schedules_give_the_rates_of_their_formulas() -> None:
    assert rates_of(Constant(0.5), 3) == [0.5, 0.5, 0.5]
    half = 1 + (10 - 1) * (1 + math.cos(math.pi / 4)) / 2, 1 + 9 / 2, 1 + 9 * (1 - math.cos(math.pi / 4)) / 2
    # 7 steps in total: two up, then five from the peak to a tenth of it, where the rate stays.
    assert rates_of(Cosine(10.0, 7, 2, 0.1), 9) == approx([5, 10, 10, *half, 1, 1, 1])


COSINE = Cosine(0.5, total_steps=13, warmup_steps=4, min_ratio=0.25)


def test_cosine_has_its_peak_midpoint_and_minimum_at_the_documented_updates() -> None:
    rates = rates_of(COSINE, 20)
    assert rates[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]  # cos 0 is 1 exactly
    # cos(pi/2) in fp64 is 6.1e-17 instead of 0, which a relative tolerance of 2^-53 covers.
    assert rates[8] == pytest.approx(0.5 * (0.25 + 0.75 / 2), rel=2**-53, abs=0)
    assert set(rates[12:]) == {0.125}  # from the last of 13 updates on; cos pi is -1 exactly
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert Cosine(0.5, total_steps=5).rates(4).lr == 0.0


@pytest.mark.parametrize("total_steps", [1, 4, 5])
def test_a_cosine_with_no_steps_left_after_the_warmup_does_not_divide_by_zero(total_steps: int) -> None:
    assert rates_of(replace(COSINE, total_steps=total_steps), 6)[3:] == [0.5, 0.5, 0.125]


def test_linear_warmup_starts_at_the_minimum_as_deepspeeds_engine_does() -> None:
    schedule = WarmupLR(warmup_min_lr=1.0, warmup_max_lr=5.0, warmup_num_steps=4, warmup_type="linear")
    assert rates_of(schedule, 8) == approx([1, 1, 2, 3, 4, 5, 5, 5])


def test_log_warmup_rises_as_the_logarithm_of_the_step() -> None:
    schedule = WarmupLR(warmup_max_lr=2.0, warmup_num_steps=8)  # log is the published default
    logs = [2 * math.log(step) / math.log(8) for step in (1, 2, 3, 4, 5, 6, 7, 8)]
    assert rates_of(schedule, 11) == approx([0, *logs, 2, 2])


def test_a_warmup_of_one_step_takes_two_steps_as_in_the_published_formula() -> None:
    assert rates_of(WarmupLR(0.0, 1.0, 1, "linear"), 5) == approx([0, 0, 0.5, 1, 1])
    assert rates_of(WarmupLR(0.0, 1.0, 1, "log"), 4) == approx([0, 0, 1, 1])


def test_warmup_decay_falls_linearly_to_the_minimum_and_stays_there() -> None:
    schedule = WarmupDecayLR(1.0, 5.0, 2, "linear", total_num_steps=6)
    # iteration 2 has gamma (6 - 2) / (6 - 2) = 1, iteration 6 has 0
    assert rates_of(schedule, 10) == approx([1, 1, 3, 5, 4, 3, 2, 1, 1, 1])


def test_warmup_cosine_rises_from_warmup_min_ratio_and_falls_to_cos_min_ratio() -> None:
    schedule = WarmupCosineLR(10.0, 6, 0.2, 2, 0.1, "linear")
    fall = [10 * (0.1 + 0.9 * (1 + math.cos(math.pi * done / 4)) / 2) for done in (1, 2, 3, 4)]
    assert rates_of(schedule, 9) == approx([0, 2, 6, *fall, 1, 1])


def test_one_cycle_raises_and_lowers_the_rate_and_moves_the_momentum_in_reverse() -> None:
    schedule = OneCycle(1.0, 5.0, 0.5, 4, 2, decay_step_size=2, cycle_min_mom=0.5, cycle_max_mom=0.9)
    assert rates_of(schedule, 11) == approx([1, 2, 3, 4, 5, 3, 1, 1 / 1.25, 1 / 1.5, 1 / 1.75, 0.5])
    momenta = [schedule.rates(made).momentum for made in range(9)]
    assert momenta == approx([0.5, 0.8, 0.7, 0.6, 0.5, 0.7, 0.9, 0.9, 0.9])  # the very first as in DeepSpeed


def test_one_cycle_without_decay_stays_at_its_minimum_and_without_momentum_gives_none() -> None:
    schedule = OneCycle(1.0, 3.0, cycle_first_step_size=2, cycle_momentum=False)
    assert rates_of(schedule, 7) == approx([1, 2, 3, 2, 1, 1, 1])
    assert schedule.rates(1).momentum is None


def test_one_cycle_with_stairs_keeps_its_rate_on_each_stair() -> None:
    schedule = OneCycle(0.0, 4.0, cycle_first_step_size=8, cycle_second_step_size=4, cycle_first_stair_count=2)
    assert rates_of(schedule, 13) == approx([0, 0, 0, 0, 2, 2, 2, 2, 4, 2, 2, 0, 0])


def test_the_momentum_decays_after_the_cycle() -> None:
    schedule = OneCycle(
        1.0, 2.0, 0.0, 1, 1, decay_step_size=4, cycle_max_mom=0.8, cycle_min_mom=0.4, decay_mom_rate=0.1
    )
    assert [schedule.rates(made).momentum for made in (2, 4, 6)] == approx([0.8, 0.8 * 1.05, 0.8 * 1.1])


def test_the_range_test_grows_forever_linearly_or_in_stairs() -> None:
    assert rates_of(LRRangeTest(0.5, 2, 3.0), 5) == approx([0.5, 1.25, 2, 2.75, 3.5])
    assert rates_of(LRRangeTest(0.5, 2, 3.0, lr_range_test_staircase=True), 5) == approx([0.5, 0.5, 2, 2, 3.5])


BAD = [
    (lambda: WarmupLR(warmup_num_steps=0), "warmup_num_steps of at least 1, found 0"),
    (lambda: WarmupLR(warmup_type="square"), "'linear' or 'log', found 'square'"),
    (lambda: WarmupCosineLR(1.0, 5, cos_min_ratio=2.0), "in [0, 1]"),
    (lambda: OneCycle(2.0, 1.0), "cycle_min_lr <= cycle_max_lr"),
    (lambda: OneCycle(1.0, 2.0, cycle_max_mom=1.0), "cycle_max_mom < 1"),
    (lambda: LRRangeTest(lr_range_test_step_size=0), "lr_range_test_step_size of at least 1"),
    (lambda: Cosine(1.0, 5, min_ratio=2.0), "min_ratio in [0, 1]"),
    (lambda: Constant(-1.0), "lr >= 0"),
]


@pytest.mark.parametrize(("build", "told"), BAD)
def test_invalid_schedule_settings_are_refused(build, told: str) -> None:
    with pytest.raises(PlanError) as caught:
        build()
    assert told in str(caught.value)


def test_schedules_optimizer_configs_groups_and_the_memory_model_do_not_import_torch() -> None:
    code = (
        "import sys, zero_runtime.optim.lr_schedule, zero_runtime.optim.configs, zero_runtime.optim.groups, "
        "zero_runtime.state_bytes; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
