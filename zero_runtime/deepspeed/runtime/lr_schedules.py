"""DeepSpeed's `runtime.lr_schedules`: the five schedules of the section scheduler as classes for a torch optimizer.

`initialize` returns one of them for a section, and takes one as `lr_scheduler`. Upper-case names of their arguments are
these names: WARMUP_MIN_LR is "warmup_min_lr".
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from zero_runtime.deepspeed.engine_optimizer import EngineOptimizer
from zero_runtime.deepspeed.schedule_section import SECOND_BETA, ScheduleOf, choose_schedule
from zero_runtime.deepspeed.schedules import JsonSchedule
from zero_runtime.deepspeed.schema import Reader
from zero_runtime.optim import lr_schedule

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
_LISTS = {"min_lrs": ("warmup_min_lr", "cycle_min_lr"), "max_lrs": ("warmup_max_lr", "cycle_max_lr")}
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = lr_schedule.LOG, lr_schedule.LINEAR


class _Schedule(JsonSchedule):
    """Takes a torch optimizer and the arguments of the section, by position in DeepSpeed's order or by name."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *given: Any, last_batch_iteration: int = -1, **named: Any
    ) -> None:
        kind = type(self).__name__
        params = dict(zip(_arguments(kind), given, strict=False)) | named
        reader = Reader()
        chosen = choose_schedule({"type": kind, "params": params}, reader)
        reader.finish()
        assert chosen is not None
        optimizer = getattr(optimizer, "optimizer", optimizer)
        chosen, notes = _fitted(chosen, optimizer)
        for note in (*reader.notes, *notes):
            logging.getLogger("zero_runtime").warning(note)
        super().__init__(optimizer, chosen)
        if last_batch_iteration >= 0:
            self.step(last_batch_iteration)

    def __getattr__(self, name: str) -> Any:
        """An argument of the schedule, of the first group; min_lrs and max_lrs are those of all groups."""
        made = self.__dict__.get("_schedules", [])
        for argument in _LISTS.get(name, (name,)):
            if made and argument in _KINDS and hasattr(made[0], argument):
                values = [getattr(one, argument) for one in made]
                values = [max(2, one) for one in values] if name == "warmup_num_steps" else values
                return values if name in _LISTS else values[0]
        raise AttributeError(f"{type(self).__name__}.{name}: neither an argument nor a method of the schedule")

    @property
    def last_batch_iteration(self) -> int:
        """The number of the last update, from 0; -1 before the first."""
        return self.updates - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next update, after one update was made, or after that of a number."""
        if last_batch_iteration is not None:
            self.updates = last_batch_iteration
        super().step()

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        super().load_state_dict({"updates": state["last_batch_iteration"] + 1, **state})


def _fitted(chosen: ScheduleOf, optimizer: torch.optim.Optimizer) -> tuple[ScheduleOf, list[str]]:
    """As `ScheduleOf.fit`, for an optimizer of torch."""
    if not chosen.cycles_momentum:
        return chosen, []
    if "betas" not in optimizer.defaults:
        fixed, note = chosen.without_momentum(type(optimizer).__name__)
        return fixed, [note]
    if isinstance(optimizer, EngineOptimizer):  # whose constants are in use
        return chosen, ["scheduler OneCycle: the second beta stays as it was at initialize; DeepSpeed sets 0.99"]
    for group in optimizer.param_groups:
        group["betas"] = (group["betas"][0], SECOND_BETA)
    return chosen, []


class _Cosine(_Schedule):
    def get_lr_ratio(self) -> float:
        """The rate of the next update divided by the group's own."""
        return float(replace(self._schedules[0], lr=1.0).rates(self.updates).lr)


class _Cycle(_Schedule):
    def get_mom(self) -> list[Any] | None:
        """By group; None if it is not cycled. As in DeepSpeed, before the first step that which ends the cycle, though
        the first update has cycle_min_mom."""
        if not self._schedules[0].cycle_momentum:
            return None
        if self.updates:
            return super().get_mom()
        betas = zip(self._schedules, super().get_mom() or [], strict=True)
        return [(made.cycle_max_mom, *now[1:]) for made, now in betas]


def _class_of(kind: str, base: type[_Schedule] = _Schedule) -> type[_Schedule]:
    return type(kind, (base,), {"__doc__": getattr(lr_schedule, kind).__doc__, "__module__": __name__})


LRRangeTest, WarmupLR, WarmupDecayLR = map(_class_of, (LR_RANGE_TEST, WARMUP_LR, WARMUP_DECAY_LR))
WarmupCosineLR, OneCycle = _class_of(WARMUP_COSINE_LR, _Cosine), _class_of(ONE_CYCLE, _Cycle)


def of_section(optimizer: torch.optim.Optimizer, schedule_of: ScheduleOf) -> JsonSchedule:
    """The schedule of a section that was read, as an instance of its class."""
    kind = globals()[schedule_of.kind.__name__]
    made: JsonSchedule = kind.__new__(kind)
    JsonSchedule.__init__(made, optimizer, schedule_of)
    return made


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --lr_schedule and an option for each argument of the schedules, which get_config_from_args reads."""
    group = parser.add_argument_group("learning rate schedule")
    group.add_argument(f"--{LR_SCHEDULE}", choices=VALID_LR_SCHEDULES)
    for name, kind in _KINDS.items():
        group.add_argument(f"--{name}", type=kind)
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The section scheduler that these arguments describe, and None; or None and what is missing."""
    kind = getattr(args, LR_SCHEDULE, None)
    if kind not in VALID_LR_SCHEDULES:
        return None, f"--{LR_SCHEDULE}: expected one of {', '.join(VALID_LR_SCHEDULES)}, found {kind}"
    found = {name: getattr(args, name, None) for name in _arguments(kind)}
    return {"type": kind, "params": {name: value for name, value in found.items() if value is not None}}, None


def _arguments(kind: str) -> list[str]:
    """The names of a schedule's arguments, in DeepSpeed's order."""
    names = [field.name for field in fields(getattr(lr_schedule, kind)) if field.name != "lr"]
    return sorted(names, key=lambda name: name != "total_num_steps")


def _kind_of(told: str) -> type:
    return next(kind for kind in (float, int, bool, str) if kind.__name__ in told)


_KINDS = {
    field.name: _kind_of(str(field.type))
    for kind in VALID_LR_SCHEDULES
    for field in fields(getattr(lr_schedule, kind))
    if field.name != "lr"
}


def __getattr__(name: str) -> str:
    if name.isupper() and name.lower() in _KINDS:
        return name.lower()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
