"""Every optimizer and scheduler in conf/ is built as the runtime's own object, with the numbers in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from orchestrator.config.optimizer import Optimizer, Scheduler
from orchestrator.config.parts import completed, keys_of_kind, plain
from orchestrator.config.strict import build, hints_of
from zero_runtime.errors import PlanError
from zero_runtime.optim import configs as optimizers
from zero_runtime.optim import lr_schedule
from zero_runtime.optim.lr_settings import SCHEDULES, CosineSettings, WarmupSettings

CONF = Path(__file__).resolve().parents[3] / "conf"


def values_of(group: str, stem: str) -> dict[Any, Any]:
    data = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{stem}.yaml"))
    assert isinstance(data, dict)
    return data


def option(group: str, kind: type, stem: str, **changed: object) -> Any:
    built, broken = build(kind, {**values_of(group, stem), **changed}, group)
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
    assert option("optimizer", Optimizer, name).rule == expected
    assert option("optimizer", Optimizer, name, no_decay=False).rule.no_decay is False


def test_arguments_of_a_torch_optimizer_are_passed_to_it() -> None:
    chosen = option("optimizer", Optimizer, "torch", name="Adadelta", arguments={"rho": 0.8}, weight_decay=0.1)
    assert chosen.rule == optimizers.TorchConfig("Adadelta", {"rho": 0.8}, 0.1)


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
    assert option("scheduler", Scheduler, name).curve.build(2.0, total_steps=30) == expected


def test_one_cycle_uses_its_optional_settings_and_null_disables_momentum_cycling() -> None:
    changed = {"fall_steps": 3, "decay_steps": 4, "decay_rate": 0.5, "momentum_min": None, "momentum_max": None}
    schedule = option("scheduler", Scheduler, "one_cycle", **changed).curve.build(2.0, total_steps=30)
    assert schedule == lr_schedule.OneCycle(0.2, 2.0, 0.5, 15, 3, decay_step_size=4, cycle_momentum=False)


def test_every_kind_can_be_built() -> None:
    for kind in optimizers.OPTIMIZERS:
        assert option("optimizer", Optimizer, kind).rule.kind == kind
    for kind in SCHEDULES:
        option("scheduler", Scheduler, kind).curve.build(1.0, total_steps=10).rates(3)


def test_the_warmup_scheduler_needs_at_least_one_warmup_step() -> None:
    with pytest.raises(PlanError, match=r"scheduler\.warmup_steps must be at least 1"):
        WarmupSettings(warmup_steps=0)
    CosineSettings(warmup_steps=0)


KINDS = [
    *(("optimizer", Optimizer, kind) for kind in optimizers.OPTIMIZERS),
    *(("scheduler", Scheduler, kind) for kind in SCHEDULES),
]


@pytest.mark.parametrize(("group", "cls", "kind"), KINDS)
def test_a_record_has_the_keys_of_all_kinds_and_is_read_back(group: str, cls: type, kind: str) -> None:
    built = option(group, cls, kind)
    record = plain(built)
    assert list(record) == list(hints_of(cls))
    assert build(cls, record, group) == (built, [])
    assert {key: value for key, value in record.items() if value not in (None, {})}.keys() <= keys_of_kind(
        cls, kind
    ).keys()
    assert {key: value for key, value in record.items() if key in keys_of_kind(cls, kind)} == values_of(group, kind)
    assert completed(cls, values_of(group, kind)) == record


def test_a_key_of_another_kind_may_be_null_and_is_refused_with_a_value() -> None:
    assert option("optimizer", Optimizer, "adamw", momentum=None, arguments={}) == option(
        "optimizer", Optimizer, "adamw"
    )
    built, broken = build(Optimizer, values_of("optimizer", "adamw") | {"momentum": 0.9, "name": "SGD"}, "optimizer")
    assert built is None
    assert list(map(str, broken)) == [
        "optimizer=adamw has no optimizer.momentum, found 0.9      fix: optimizer.momentum=null",
        "optimizer=adamw has no optimizer.name, found SGD      fix: optimizer.name=null",
    ]


def test_keys_that_a_file_leaves_out_have_the_default_of_the_group_or_are_needed() -> None:
    built, broken = build(Optimizer, {"kind": "adamw", "lr": 0.5}, "optimizer")
    assert (built, broken) == (Optimizer(lr=0.5), [])
    _, broken = build(Scheduler, {"kind": "one_cycle", "rise_steps": 3}, "scheduler")
    assert [str(one) for one in broken] == [
        "scheduler=one_cycle needs scheduler.start_lr_ratio, found null      fix: scheduler.start_lr_ratio=0.1"
    ]


@pytest.mark.parametrize("kind", ["adamv", None, 3, ["adamw"]])
def test_an_unknown_kind_is_refused_with_the_kinds_there_are(kind: object) -> None:
    _, broken = build(Optimizer, {"kind": kind, "lr": "fast"}, "optimizer")
    told = "\n".join(map(str, broken))
    assert (
        "optimizer.kind must be one of adamw, adamw8bit, adam, sgd, lion, lamb, muon, onebitadam, torch, found" in told
    )
    assert "optimizer.lr must be a number, found 'fast'" in told


def test_problems_of_the_group_and_of_its_kind_are_reported_together() -> None:
    _, broken = build(Optimizer, {"kind": "adamw", "lr": -1.0, "beta2": 1.0, "eps": 0.0}, "optimizer")
    assert [one.rule.split()[0] for one in broken] == ["optimizer.beta2", "optimizer.eps", "optimizer.lr"]
