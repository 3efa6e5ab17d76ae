"""Runs any LRScheduler of torch as a function of the updates made, on an optimizer with one element per group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import OptimizerConfig
from zero_runtime.optim.lr_schedule import Rates

_UNTOUCHED = 0.123456789  # a momentum that no scheduler sets: any other value comes from the scheduler


class TorchSchedule:
    """A schedule from `build`, such as `lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)`.

    The optimizer passed to `build` has the groups of `config` in order, including empty ones, and one more for the
    parameters in no group; their rates are `lr` times their factors. ReduceLROnPlateau is refused, because it follows a
    metric.
    """

    def __init__(
        self, build: Callable[[torch.optim.Optimizer], LRScheduler], config: OptimizerConfig, lr: float
    ) -> None:
        self._build = build
        self._lrs = [lr * group.lr_scale for group in config.groups] + [lr]
        self._start()

    def rates(self, updates: int) -> Rates:
        """One rate for each group, and the momentum of all groups if the scheduler has changed it."""
        if updates < self._made:
            self._start()
        while self._made < updates:
            self._optimizer.step()  # updates nothing, but torch warns if a scheduler is ahead of its optimizer
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
