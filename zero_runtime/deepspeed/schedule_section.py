"""Converts the section scheduler to a learning-rate schedule of the runtime. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from zero_runtime.deepspeed.json_text import shown
from zero_runtime.deepspeed.schema import BOOL, NUMBER, NUMBER_OR_LIST, TEXT, WHOLE, Reader, idle, mapped
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import MuonConfig, OptimizerConfig, TorchConfig
from zero_runtime.optim.lr_schedule import (
    LINEAR,
    LOG,
    LRRangeTest,
    LrSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR)
}
_KINDS = {"float": NUMBER, "int": WHOLE, "int | None": WHOLE, "bool": BOOL, "str": TEXT}
_OF_THE_OPTIMIZER = ("lr",)  # a field of WarmupCosineLR: the group's rate, not a key of the section
_BY_GROUP = (
    *("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr"),
    *("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"),
)
_TOP_RATE = "warmup_max_lr"
_STEPS = "warmup_num_steps"
_STAIRS = ("cycle_first_stair_count", "cycle_second_stair_count")
SECOND_BETA = 0.99  # DeepSpeed's OneCycle sets both betas


@dataclass(frozen=True)
class ScheduleOf:
    """A valid section: gives the schedule of each parameter group. `values`: the fields of `kind` that are given; a
    tuple has one rate for each group, and a `warmup_max_lr` of None is the group's own rate."""

    kind: type[Any]
    values: Mapping[str, Any]

    def __call__(self, lr: float, group: int = 0) -> LrSchedule:
        """The schedule of the group of this number, whose own rate is `lr`."""
        values = {name: one[group] if isinstance(one, tuple) else one for name, one in self.values.items()}
        if self.takes_own_rate:
            values[_TOP_RATE] = lr
        own = {one.name: lr for one in fields(self.kind) if one.name in _OF_THE_OPTIMIZER}
        made: LrSchedule = self.kind(**values, **own)
        return made

    @property
    def takes_own_rate(self) -> bool:
        """Whether it rises to each group's own rate."""
        return self.values.get(_TOP_RATE, 0.0) is None

    @property
    def by_group(self) -> dict[str, int]:
        """The keys with a list of rates, and the number of rates in each."""
        return {name: len(one) for name, one in self.values.items() if isinstance(one, tuple)}

    @property
    def cycles_momentum(self) -> bool:
        """Whether it changes the momentum."""
        return self.kind is OneCycle and bool(self.values.get("cycle_momentum", True))

    def without_momentum(self, optimizer: str) -> tuple[ScheduleOf, str]:
        """The schedule for an optimizer without betas, and a note."""
        note = f"scheduler OneCycle: as in DeepSpeed, the momentum of {optimizer} is not cycled (no betas)"
        return replace(self, values={**self.values, "cycle_momentum": False}), note

    def fit(self, optimizer: OptimizerConfig) -> tuple[ScheduleOf, OptimizerConfig, list[str]]:
        """The schedule and the optimizer as DeepSpeed's OneCycle has them when it cycles the momentum, and notes."""
        if not self.cycles_momentum:
            return self, optimizer, []
        if "beta2" in vars(optimizer) and not isinstance(optimizer, MuonConfig):
            second: dict[str, Any] = {"beta2": SECOND_BETA}
            fitted: OptimizerConfig = replace(optimizer, **second)
        elif isinstance(optimizer, TorchConfig) and optimizer.uses_betas:
            betas = (optimizer.arguments.get("betas", (0.9,))[0], SECOND_BETA)
            fitted = replace(optimizer, arguments={**optimizer.arguments, "betas": betas})
        else:
            fixed, note = self.without_momentum(optimizer.name)
            return fixed, optimizer, [note]
        note = f"scheduler OneCycle: as in DeepSpeed, the second beta is {SECOND_BETA}, as it cycles the momentum"
        return self, fitted, [note]


def choose_schedule(section: Mapping[str, Any] | None, reader: Reader) -> ScheduleOf | None:
    """The schedule of a section. None without a section, or if it is invalid: the reader's problems then say why."""
    if section is None:
        return None
    kind = _TYPES.get(section.get("type", ""))
    if kind is None:
        reader.problems.append(
            f"scheduler.type: expected one of {', '.join(_TYPES)}, found {shown(section.get('type'))}; any other "
            "schedule of torch may be handed to initialize as lr_scheduler"
        )
        return None
    own = [field for field in fields(kind) if field.name not in _OF_THE_OPTIMIZER]
    table = {one.name: mapped(NUMBER_OR_LIST if one.name in _BY_GROUP else _KINDS[str(one.type)]) for one in own}
    before = len(reader.problems)
    params = section.get("params", {})
    if params.get(_STEPS, 1) is None:  # other nulls stand for the default
        reader.refuse(f"scheduler.params.{_STEPS}", "expected a whole number, found null; leave it out for 1000")
    values = reader.read(table | {"last_batch_iteration": idle(WHOLE)}, params, "scheduler.params.")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    missing = [field.name for field in own if field.default is MISSING and field.name not in values]
    if kind is WarmupDecayLR and "total_num_steps" not in values:
        missing.append("total_num_steps")
    if len(reader.problems) == before and missing:
        reader.problems.append(f"scheduler.params: {kind.__name__} needs {', '.join(missing)}")
    if len(reader.problems) > before:
        return None
    _take_own_rate(kind, params, values, reader)
    if values.get("warmup_type", LOG) not in (LOG, LINEAR):
        told = f"scheduler {kind.__name__}: warmup_type {shown(values['warmup_type'])} is unknown, and 'log' is used"
        reader.notes.append(f"{told}, as in DeepSpeed")
        values["warmup_type"] = LOG
    if any(values.get(name) for name in _STAIRS):
        reader.notes.append("scheduler OneCycle: stair counts have an effect, as in DeepSpeed 0.19.8 (not in 0.19.3)")
    chosen = ScheduleOf(kind, values)
    try:
        for group in range(min(chosen.by_group.values(), default=1)):
            chosen(0.0, group)
    except PlanError as error:
        reader.problems.append(str(error))
        return None
    return chosen


def _take_own_rate(kind: type[Any], params: Mapping[str, Any], values: dict[str, Any], reader: Reader) -> None:
    """Without warmup_max_lr WarmupLR rises to each group's own rate; WarmupDecayLR does if the key is null."""
    if _TOP_RATE in values or not (kind is WarmupLR or (kind is WarmupDecayLR and _TOP_RATE in params)):
        return
    values[_TOP_RATE] = None
    reader.notes.append(
        f"scheduler {kind.__name__} without {_TOP_RATE}: it rises to each group's own lr, as in DeepSpeed since 0.17.2 "
        "(before, to 0.001)"
    )
