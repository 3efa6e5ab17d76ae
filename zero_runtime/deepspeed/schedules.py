"""Learning-rate schedules of the drop-in engine: those of the section scheduler, and torch schedulers of the user."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zero_runtime.deepspeed.json_text import shown
from zero_runtime.deepspeed.schema import BOOL, NUMBER, TEXT, WHOLE, Reader, idle, mapped
from zero_runtime.errors import PlanError
from zero_runtime.optim.lr_schedule import LRRangeTest, LrSchedule, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR)
}
_KINDS = {"float": NUMBER, "int": WHOLE, "int | None": WHOLE, "bool": BOOL, "str": TEXT}
_OF_THE_OPTIMIZER = ("lr",)  # a field of WarmupCosineLR: the group's rate, not a key of the section
ScheduleOf = Callable[[float], LrSchedule]  # takes a group's rate


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
    table = {field.name: mapped(_KINDS[str(field.type)]) for field in own} | {"last_batch_iteration": idle(WHOLE)}
    before = len(reader.problems)
    values = reader.read(table, section.get("params", {}), "scheduler.params.")
    missing = [field.name for field in own if field.default is MISSING and field.name not in values]
    if kind is WarmupDecayLR and "total_num_steps" not in values:
        missing.append("total_num_steps")
    if len(reader.problems) == before and missing:
        reader.problems.append(f"scheduler.params: {kind.__name__} needs {', '.join(missing)}")
    if len(reader.problems) > before:
        return None
    takes_lr = len(own) < len(fields(kind))

    def schedule(lr: float) -> LrSchedule:
        return kind(**values, lr=lr) if takes_lr else kind(**values)

    try:
        schedule(0.0)
    except PlanError as error:
        reader.problems.append(str(error))
        return None
    return schedule


class JsonSchedule:
    """Applies a schedule of the section scheduler to an optimizer's groups; the engine steps it after each update."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule_of: ScheduleOf) -> None:
        self.optimizer = optimizer
        self._schedules = [schedule_of(float(group["lr"])) for group in optimizer.param_groups]
        self.updates = 0
        self._set()

    def step(self) -> None:
        """Set the rates of the next update, after one update was made."""
        self.updates += 1
        self._set()

    def get_lr(self) -> list[float]:
        """The learning rates of the next update, by group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.updates = state["updates"]
        self._set()

    def _set(self) -> None:
        for group, schedule in zip(self.optimizer.param_groups, self._schedules, strict=True):
            rates = schedule.rates(self.updates)
            group["lr"] = rates.lr
            if rates.momentum is not None:
                _set_momentum(group, rates.momentum)


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    elif group.get("momentum"):
        group["momentum"] = momentum
    else:
        raise PlanError(
            "scheduler: it cycles the momentum and the optimizer has none; set scheduler.params.cycle_momentum=false"
        )


Schedule = JsonSchedule | LRScheduler


def client_schedule(
    given: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler],
    optimizer: torch.optim.Optimizer,
    client_optimizer: torch.optim.Optimizer | None,
) -> LRScheduler:
    """The user's schedule: one for the optimizer passed to initialize, or one that the callable creates for ours."""
    made = given
    if not isinstance(given, (LRScheduler, ReduceLROnPlateau)):
        if not callable(given):
            raise PlanError(
                f"lr_scheduler: expected a torch LRScheduler or a callable that makes one, found a "
                f"{type(given).__module__}.{type(given).__name__}"
            )
        made = given(optimizer)
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise PlanError(
            f"lr_scheduler: a {type(made).__name__} cannot be stepped by the engine, which knows updates alone; make "
            "it from the optimizer that initialize returns, and step it yourself"
        )
    if made.optimizer not in (optimizer, client_optimizer):
        raise PlanError(
            f"lr_scheduler: this {type(made).__name__} drives another optimizer than the one handed to initialize; "
            "hand both over, or a callable that makes the scheduler from an optimizer"
        )
    return made


def advance(schedule: Schedule) -> None:
    """Advance the schedule by one step.

    torch would warn that the scheduler's optimizer was not stepped, since the engine steps another; this is suppressed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        schedule.step()


def rates_now(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The groups' learning rates as floats."""
    return [float(group["lr"]) for group in groups]
