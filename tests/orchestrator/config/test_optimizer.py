"""Every optimizer and scheduler in conf/ is built as the runtime's own object, with the numbers in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from orchestrator.config.optimizer import Optimizer, OptimizerKind, Scheduler, SchedulerKind
from orchestrator.config.strict import ConfigError, build
from orchestrator.worker.optimizer import build_optimizer, build_schedule
from zero_runtime.optim import configs as optimizers
from zero_runtime.optim import lr_schedule

CONF = Path(__file__).resolve().parents[3] / "conf"


def option(group: str, kind: type, stem: str, **changed: object) -> Any:
    data = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{stem}.yaml"))
    assert isinstance(data, dict)
    built, broken = build(kind, {**data, **changed})
    assert not broken
    return built


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", optimizers.AdamWConfig(0.9, 0.95, 1e-8, 0.1)),
        ("adamw8bit", optimizers.AdamW8bitConfig(0.9, 0.95, 1e-8, 0.1)),
        ("adam", optimizers.AdamConfig(0.9, 0.95, 1e-8, 0.0)),
        ("sgd", optimizers.SgdConfig(0.9, 0.0, 0.0, False)),
        ("lion", optimizers.LionConfig(0.9, 0.99, 0.5)),
        ("lamb", optimizers.LambConfig(0.9, 0.999, 1e-6, 0.01)),
        ("torch", optimizers.TorchConfig("Adagrad", {}, 0.0)),
    ],
)
def test_each_optimizer_file_is_built_with_its_constants(name: str, expected: optimizers.OptimizerConfig) -> None:
    assert build_optimizer(option("optimizer", Optimizer, name)) == expected
    assert build_optimizer(option("optimizer", Optimizer, name, no_decay=False)).no_decay is False


def test_arguments_of_a_torch_optimizer_are_passed_to_it() -> None:
    chosen = option("optimizer", Optimizer, "torch", name="Adadelta", arguments={"rho": 0.8}, weight_decay=0.1)
    assert build_optimizer(chosen) == optimizers.TorchConfig("Adadelta", {"rho": 0.8}, 0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", lr_schedule.Constant(2.0)),
        ("cosine", lr_schedule.Cosine(2.0, 30, 5, 0.1)),
        ("warmup", lr_schedule.WarmupLR(0.0, 2.0, 5, "linear")),
        ("warmup_decay", lr_schedule.WarmupDecayLR(0.0, 2.0, 5, "linear", total_num_steps=30)),
        ("warmup_cosine", lr_schedule.WarmupCosineLR(2.0, 30, 0.0, 5, 0.0001, "linear")),
        (
            "one_cycle",
            lr_schedule.OneCycle(0.2, 2.0, cycle_first_step_size=15, cycle_min_mom=0.85, cycle_max_mom=0.95),
        ),
        ("lr_range_test", lr_schedule.LRRangeTest(2.0, 5, 1.0, False)),
    ],
)
def test_each_scheduler_file_is_built_as_its_schedule(name: str, expected: lr_schedule.LrSchedule) -> None:
    assert build_schedule(option("scheduler", Scheduler, name), 2.0, total_steps=30) == expected


def test_one_cycle_uses_its_optional_settings_and_null_disables_momentum_cycling() -> None:
    changed = {"fall_steps": 3, "decay_steps": 4, "decay_rate": 0.5, "momentum_min": None, "momentum_max": None}
    schedule = build_schedule(option("scheduler", Scheduler, "one_cycle", **changed), 2.0, total_steps=30)
    assert schedule == lr_schedule.OneCycle(0.2, 2.0, 0.5, 15, 3, decay_step_size=4, cycle_momentum=False)


def test_every_kind_can_be_built() -> None:
    for kind in OptimizerKind:
        build_optimizer(option("optimizer", Optimizer, str(kind)))
    for kind in SchedulerKind:
        build_schedule(option("scheduler", Scheduler, str(kind)), 1.0, total_steps=10).rates(3)


def test_the_warmup_scheduler_needs_at_least_one_warmup_step() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.warmup_steps must be at least 1"):
        Scheduler(SchedulerKind.warmup, warmup_steps=0)
    Scheduler(SchedulerKind.cosine, warmup_steps=0)
