"""Learning-rate schedules that drive the drop-in engine: those of the section scheduler, and torch's of the user."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zero_runtime.deepspeed.schedule_section import ScheduleOf
from zero_runtime.errors import PlanError


class JsonSchedule:
    """Applies a schedule of the section scheduler to an optimizer's groups; the engine steps it after each update."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule_of: ScheduleOf) -> None:
        self.optimizer = optimizer
        groups = optimizer.param_groups
        for name, count in schedule_of.by_group.items():
            if count != len(groups):
                raise PlanError(
                    f"scheduler.params.{name}: expected one rate, or one for each of the {len(groups)} parameter "
                    f"groups, found {count}"
                )
        self._schedules: list[Any] = [schedule_of(float(group["lr"]), index) for index, group in enumerate(groups)]
        self.updates = 0
        self._set()

    @property
    def last_batch_iteration(self) -> int:
        """The number of the last update, from 0; -1 before the first."""
        return self.updates - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next update, after one update was made, or after that of a number."""
        self.updates = 1 + (self.updates if last_batch_iteration is None else last_batch_iteration)
        self._set()

    def get_lr(self) -> list[float]:
        """The learning rates of the next update, by group."""
        return rates_now(self.optimizer.param_groups)

    get_last_lr = get_lr

    def get_mom(self) -> list[Any]:
        """The momentum of the next update, by group: its betas, or its momentum."""
        return momenta_now(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.updates = state["last_batch_iteration"] + 1
        self._set()

    def _set(self) -> None:
        for group, schedule in zip(self.optimizer.param_groups, self._schedules, strict=True):
            rates = schedule.rates(self.updates)
            rate: Any = rates.lr
            if isinstance(group["lr"], torch.Tensor):  # a compiled optimizer reads this tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
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
    given: Schedule | Callable[[torch.optim.Optimizer], Schedule],
    optimizer: torch.optim.Optimizer,
    client_optimizer: torch.optim.Optimizer | None,
) -> Schedule:
    """The user's schedule: one for the optimizer passed to initialize, or one that the callable creates for ours."""
    made: Any = given
    if not isinstance(given, (LRScheduler, ReduceLROnPlateau, JsonSchedule)):
        if not callable(given):
            raise PlanError(
                f"lr_scheduler: expected a torch LRScheduler or a callable that makes one, found a "
                f"{type(given).__module__}.{type(given).__name__}"
            )
        made = given(optimizer)
    if not isinstance(made, (LRScheduler, JsonSchedule)) or isinstance(made, ReduceLROnPlateau):
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


def advance(schedule: Schedule, arguments: Mapping[str, Any]) -> None:
    """Advance the schedule by one step; arguments: of its method `step`.

    torch would warn that the scheduler's optimizer was not stepped, since the engine steps another; this is suppressed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        schedule.step(**arguments)


def momenta_now(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The groups' betas or momentum."""
    return [group.get("betas", group.get("momentum")) for group in groups]


def rates_now(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The groups' learning rates as floats."""
    return [float(group["lr"]) for group in groups]
