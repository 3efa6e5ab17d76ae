"""Learning-rate schedules as settings: ratios of a learning rate that is given later. Standard library only.

`build` gives the schedule (lr_schedule.py) of a run. Steps are optimizer updates, and ratios are relative to the
learning rate of the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zero_runtime.limits import Limits
from zero_runtime.optim.lr_schedule import (
    LINEAR,
    Constant,
    Cosine,
    LRRangeTest,
    LrSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    WarmupType,
)

_PAIRS = (("decay_steps", "decay_rate"), ("momentum_min", "momentum_max"))


@dataclass(frozen=True)
class LrSettings:
    """Base class of the settings of the group `scheduler` (see limits.py). Those with the same name have the same
    limits."""

    kind: ClassVar[str]  # its name in a configuration file
    least_warmup: ClassVar[int] = 1  # DeepSpeed's warm-ups have at least one step

    def __post_init__(self) -> None:
        limits = Limits.of(self, "scheduler")
        limits.at_least(self.least_warmup, "warmup_steps")
        limits.at_least(1, "rise_steps", "fall_steps", decay_steps=10, interval_steps=5)
        limits.at_least(0, "interval_rate", decay_rate=0.1)
        for name in ("start_lr_ratio", "min_lr_ratio"):
            limits.must(name, lambda value: 0 <= value <= 1, "from 0 to 1")
        limits.must("momentum_min", lambda value: 0 <= value < 1, "from 0 to below 1", 0.8)
        limits.must("momentum_max", lambda value: 0 <= value < 1, "from 0 to below 1", 0.9)
        self._check(limits)
        limits.conclude()

    def _check(self, limits: Limits) -> None:
        """Records the limits that only this schedule has."""

    @property
    def cycles_momentum(self) -> bool:
        """Whether the momentum changes over the steps, which needs an optimizer with momentum."""
        return False

    def build(self, lr: float, total_steps: int) -> LrSchedule:
        """The schedule of a run of `total_steps` steps. `lr`: its peak, or the start of a range test."""
        raise NotImplementedError


@dataclass(frozen=True)
class ConstantSettings(LrSettings):
    """The same learning rate at every step."""

    kind = "constant"

    def build(self, lr: float, total_steps: int) -> LrSchedule:
        return Constant(lr)


@dataclass(frozen=True)
class CosineSettings(LrSettings):
    """A linear rise over `warmup_steps`, then a cosine down to `min_lr_ratio` at the last step."""

    kind = "cosine"
    least_warmup = 0

    warmup_steps: int = 5
    min_lr_ratio: float = 0.1

    def build(self, lr: float, total_steps: int) -> LrSchedule:
        return Cosine(lr, total_steps, self.warmup_steps, self.min_lr_ratio)


@dataclass(frozen=True)
class WarmupSettings(LrSettings):
    """A rise from `start_lr_ratio` over `warmup_steps`, linear or logarithmic; then constant."""

    kind = "warmup"

    warmup_steps: int = 5
    warmup_type: WarmupType = LINEAR
    start_lr_ratio: float = 0.0

    def build(self, lr: float, total_steps: int) -> LrSchedule:
        return WarmupLR(lr * self.start_lr_ratio, lr, self.warmup_steps, self.warmup_type)


@dataclass(frozen=True)
class WarmupDecaySettings(WarmupSettings):
    """The rise of `warmup`, then a linear fall to `start_lr_ratio` at the end."""

    kind = "warmup_decay"

    def build(self, lr: float, total_steps: int) -> LrSchedule:
        start = lr * self.start_lr_ratio
        return WarmupDecayLR(start, lr, self.warmup_steps, self.warmup_type, total_num_steps=total_steps)


@dataclass(frozen=True)
class WarmupCosineSettings(WarmupSettings):
    """The rise of `warmup`, then a cosine down to `min_lr_ratio` at the end."""

    kind = "warmup_cosine"

    min_lr_ratio: float = 0.1

    def build(self, lr: float, total_steps: int) -> LrSchedule:
        start, low = self.start_lr_ratio, self.min_lr_ratio
        return WarmupCosineLR(lr, total_steps, start, self.warmup_steps, low, self.warmup_type)


@dataclass(frozen=True)
class OneCycleSettings(LrSettings):
    """A rise from `start_lr_ratio` over `rise_steps`, a fall back over `fall_steps` (None: as many), then a division by
    1 + decay_rate * steps / decay_steps. The momentum moves in the opposite direction, from `momentum_max` to
    `momentum_min` and back; None for both keeps it constant."""

    kind = "one_cycle"

    start_lr_ratio: float = 0.1
    rise_steps: int = 10
    fall_steps: int | None = None
    decay_steps: int | None = None
    decay_rate: float | None = None
    momentum_min: float | None = None
    momentum_max: float | None = None

    def _check(self, limits: Limits) -> None:
        values = vars(self)
        for pair in _PAIRS:
            given = [name for name in pair if values[name] is not None]
            if len(given) == 1:
                (missing,) = {*pair} - {*given}
                limits.refuse(f"scheduler.{given[0]} needs scheduler.{missing}", None, f"scheduler.{given[0]}=null")
        low, high = self.momentum_min, self.momentum_max
        if low is not None and high is not None and low > high:
            rule = f"scheduler.momentum_min must be at most momentum_max={high}"
            limits.refuse(rule, low, f"scheduler.momentum_min={high}")

    @property
    def cycles_momentum(self) -> bool:
        return self.momentum_max is not None

    def build(self, lr: float, total_steps: int) -> LrSchedule:
        start, decay_rate = lr * self.start_lr_ratio, self.decay_rate or 0.0
        steps = (self.rise_steps, self.fall_steps)
        schedule = OneCycle(start, lr, decay_rate, *steps, decay_step_size=self.decay_steps or 0, cycle_momentum=False)
        if self.momentum_min is None or self.momentum_max is None:
            return schedule
        return replace(schedule, cycle_momentum=True, cycle_min_mom=self.momentum_min, cycle_max_mom=self.momentum_max)


@dataclass(frozen=True)
class RangeTestSettings(LrSettings):
    """Grows by `interval_rate` times the learning rate every `interval_steps`, in jumps with `staircase`."""

    kind = "lr_range_test"

    interval_steps: int = 5
    interval_rate: float = 1.0
    staircase: bool = False

    def build(self, lr: float, total_steps: int) -> LrSchedule:
        return LRRangeTest(lr, self.interval_steps, self.interval_rate, self.staircase)


SCHEDULES: dict[str, type[LrSettings]] = {
    settings.kind: settings
    for settings in (
        *(ConstantSettings, CosineSettings, WarmupSettings, WarmupDecaySettings, WarmupCosineSettings),
        *(OneCycleSettings, RangeTestSettings),
    )
}
