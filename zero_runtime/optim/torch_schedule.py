"""Any LRScheduler of torch as a function of the updates made: it drives an optimizer of one element a group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import OptimizerConfig
from zero_runtime.optim.lr_schedule import Rates

_UNTOUCHED = 0.123456789  # a momentum that no scheduler sets: another one was set by it


class TorchSchedule:
    """`build(optimizer)` makes the scheduler, as `lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)`.

    The optimizer that it sees has the groups of `config` in order, empty ones too, and one more for the parameters
    in none; their rates are `lr` times their factors. ReduceLROnPlateau is refused: it follows a metric.
    """

    def __init__(
        self, build: Callable[[torch.optim.Optimizer], LRScheduler], config: OptimizerConfig, lr: float
    ) -> None:
        self._build = build
        self._lrs = [lr * group.lr_scale for group in config.groups] + [lr]
        self._start()

    def rates(self, updates: int) -> Rates:
        """One rate for each group; the momentum of all where the scheduler has changed it."""
        if updates < self._made:
            self._start()
        while self._made < updates:
            self._optimizer.step()  # of nothing: torch warns where a scheduler is ahead of its optimizer
            self._scheduler.step()
            self._made += 1
        groups = self._optimizer.param_groups
        momentum = groups[0]["momentum"]
        return Rates(tuple(float(group["lr"]) for group in groups), None if momentum == _UNTOUCHED else momentum)

    def _start(self) -> None:
        groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in self._lrs]
        self._optimizer = torch.optim.SGD(groups, lr=self._lrs[-1], momentum=_UNTOUCHED)
        self._scheduler = self._build(self._optimizer)
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise PlanError(
                "scheduler ReduceLROnPlateau: expected a function of the updates made, found one of a metric; set "
                "the rate that you pass to step() yourself"
            )
        self._made = 0
