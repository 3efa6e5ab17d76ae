"""Learning rates as functions of the number of updates already made. Standard library only.

`rates(updates)` returns the rates of update number `updates + 1`. A skipped step makes no update, so it does not
advance a schedule. The parameters of DeepSpeed's five schedules have the names and defaults that DeepSpeed publishes
(WarmupLR's warmup_max_lr alone is a group's own rate there: zero_runtime/deepspeed/schedule_section.py). Their rates
are those that its engine trains with, with the same roundings: the engine steps a schedule after each update, so its
iteration is `updates - 1`, and its first update uses the schedule's first value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from zero_runtime.errors import PlanError

LINEAR: Final = "linear"
LOG: Final = "log"
WarmupType = Literal["linear", "log"]


@dataclass(frozen=True)
class Rates:
    """Rates of one update. `lr`: one rate for all groups (times each group's factor), or one for each group in order
    and one more for the parameters in no group. `momentum`: the value if a schedule cycles it; None keeps the
    optimizer's own."""

    lr: float | tuple[float, ...]
    momentum: float | None = None


class LrSchedule(Protocol):
    """Anything that gives the rates of an update."""

    def rates(self, updates: int) -> Rates: ...


@dataclass(frozen=True)
class Constant:
    """The same rate forever."""

    lr: float

    def __post_init__(self) -> None:
        _check("Constant", {f"lr >= 0, found {self.lr}": self.lr >= 0})

    def rates(self, updates: int) -> Rates:
        return Rates(self.lr)


@dataclass(frozen=True)
class Cosine:
    """A linear warm-up, lr * (updates + 1) / warmup_steps, then half a cosine from lr to min_ratio * lr, reached at
    the last of total_steps updates (arXiv 1608.03983, equation 5, without restarts)."""

    lr: float
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check(
            "Cosine",
            {
                f"lr >= 0, found {self.lr}": self.lr >= 0,
                f"warmup_steps >= 0, found {self.warmup_steps}": self.warmup_steps >= 0,
                f"min_ratio in [0, 1], found {self.min_ratio}": 0 <= self.min_ratio <= 1,
            },
        )

    def rates(self, updates: int) -> Rates:
        if updates < self.warmup_steps:
            return Rates(self.lr * (updates + 1) / self.warmup_steps)
        span = max(self.total_steps - 1 - self.warmup_steps, 1)
        progress = min((updates - self.warmup_steps) / span, 1.0)
        return Rates(self.lr * (self.min_ratio + (1 - self.min_ratio) * (1 + math.cos(math.pi * progress)) / 2))


@dataclass(frozen=True)
class WarmupLR:
    """From warmup_min_lr to warmup_max_lr over warmup_num_steps, then constant.

    With iteration i = updates - 1 and W = max(2, warmup_num_steps), rate = min + (max - min) * gamma, where gamma is
    0 for i < 0, log(i + 1) / log(W) (type log) or i / W (type linear) for i < W, and `_after(i)` from W on.
    """

    warmup_min_lr: float = 0.0
    warmup_max_lr: float = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = LOG

    def __post_init__(self) -> None:
        lrs = (self.warmup_min_lr, self.warmup_max_lr)
        expected = {f"warmup_min_lr and warmup_max_lr >= 0, found {lrs}": min(lrs) >= 0}
        _check(type(self).__name__, expected | _warmup(self.warmup_num_steps, self.warmup_type))

    def rates(self, updates: int) -> Rates:
        iteration, steps = updates - 1, max(2, self.warmup_num_steps)
        gamma = _rise(iteration, steps, self.warmup_type) if iteration < steps else self._after(iteration)
        return Rates(self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * gamma)

    def _after(self, iteration: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """WarmupLR's rise, then a linear fall back to warmup_min_lr at iteration total_num_steps."""

    total_num_steps: int = 10_000

    def _after(self, iteration: int) -> float:
        fall = max(1.0, self.total_num_steps - max(2, self.warmup_num_steps))
        return max(0.0, (self.total_num_steps - iteration) / fall)


@dataclass(frozen=True)
class WarmupCosineLR:
    """Ratios of `lr`: WarmupLR's rise from warmup_min_ratio to 1, then half a cosine down to cos_min_ratio.

    With i and W as in WarmupLR, the fall is cos_min + (1 - cos_min) * (1 + cos(pi * p)) / 2 with
    p = min(1, (i - W + 1) / max(1, total_num_steps - W)). The very first update has a rate of 0.
    """

    lr: float
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = LOG

    def __post_init__(self) -> None:
        ratios = (self.warmup_min_ratio, self.cos_min_ratio)
        expected = {
            f"lr >= 0, found {self.lr}": self.lr >= 0,
            f"warmup_min_ratio and cos_min_ratio in [0, 1], found {ratios}": 0 <= min(ratios) <= max(ratios) <= 1,
        }
        _check("WarmupCosineLR", expected | _warmup(self.warmup_num_steps, self.warmup_type))

    def rates(self, updates: int) -> Rates:
        iteration, steps = updates - 1, max(2, self.warmup_num_steps)
        if iteration < 0:
            return Rates(0.0)
        if iteration < steps:
            rise = _rise(iteration, steps, self.warmup_type)
            return Rates(self.lr * (self.warmup_min_ratio + (1 - self.warmup_min_ratio) * rise))
        progress = min(1.0, (iteration - steps + 1) / max(1, self.total_num_steps - steps))
        fall = (1 + math.cos(math.pi * progress)) / 2
        return Rates(self.lr * (self.cos_min_ratio + (1 - self.cos_min_ratio) * fall))


@dataclass(frozen=True)
class OneCycle:
    """One cycle of the rate up and down, of the momentum down and up, then a decay (arXiv 1803.09820, section 4).

    With F and G the first and second step sizes, the scale s is updates / F up to F, then (F + G - updates) / G up to
    F + G; rate = min + (max - min) * s, momentum = max - (max - min) * s. With stairs, s is rounded down to a multiple
    of 1 / stairs. After n = updates - F - G further updates, with d = n / decay_step_size: rate = min / (1 +
    decay_lr_rate * d), momentum = max * (1 + decay_mom_rate * d); without a decay_step_size both stay constant. As in
    DeepSpeed, the momentum of the very first update is cycle_min_mom.
    """

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        lrs, momenta = (self.cycle_min_lr, self.cycle_max_lr), (self.cycle_min_mom, self.cycle_max_mom)
        sizes, decay = (self.cycle_first_step_size, self._second), self.decay_step_size
        _check(
            "OneCycle",
            {
                f"0 <= cycle_min_lr <= cycle_max_lr, found {lrs}": 0 <= lrs[0] <= lrs[1],
                f"0 <= cycle_min_mom <= cycle_max_mom < 1, found {momenta}": 0 <= momenta[0] <= momenta[1] < 1,
                f"a first step size of at least 1, a second of at least 0, found {sizes}": sizes[0] >= 1
                and sizes[1] >= 0,
                f"decay_step_size of at least 0, found {decay}": decay >= 0,
            },
        )

    @property
    def _second(self) -> int:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    def rates(self, updates: int) -> Rates:
        past = updates - self.cycle_first_step_size - self._second
        if past <= 0:
            scale = self._scale(updates)
            lr = self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * scale
            momentum = self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * (scale if updates else 1.0)
        else:
            decays = past / self.decay_step_size if self.decay_step_size else 0.0
            lr = self.cycle_min_lr / (1 + self.decay_lr_rate * decays)
            momentum = self.cycle_max_mom * (1 + self.decay_mom_rate * decays)
        return Rates(lr, momentum if self.cycle_momentum else None)

    def _scale(self, updates: int) -> float:
        first, second = self.cycle_first_step_size, self._second
        total = first + second
        ratio, place = first / total, 1.0 + updates / total - math.floor(1 + updates / total)
        rising = place <= ratio
        stairs = self.cycle_first_stair_count
        if not rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if stairs > 0:
            past, size = (updates % total, first) if rising else (total - updates % total, second)
            return past * stairs // size / stairs
        return place / ratio if rising else (place - 1) / (ratio - 1)


@dataclass(frozen=True)
class LRRangeTest:
    """min_lr * (1 + step_rate * updates / step_size), to find the rate at which training breaks (arXiv 1506.01186);
    with a staircase, updates / step_size is rounded down."""

    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def __post_init__(self) -> None:
        size, numbers = self.lr_range_test_step_size, (self.lr_range_test_min_lr, self.lr_range_test_step_rate)
        _check(
            "LRRangeTest",
            {
                f"lr_range_test_step_size of at least 1, found {size}": size >= 1,
                f"a min_lr and a step_rate of at least 0, found {numbers}": min(numbers) >= 0,
            },
        )

    def rates(self, updates: int) -> Rates:
        size = self.lr_range_test_step_size
        intervals = float(updates // size) if self.lr_range_test_staircase else updates / size
        return Rates(self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * intervals))


def _rise(iteration: int, steps: int, kind: str) -> float:
    """A rise from 0 to 1 over `steps` iterations; 0 before the first."""
    if iteration < 0:
        return 0.0
    return 1.0 / math.log(steps) * math.log(iteration + 1) if kind == LOG else iteration / steps


def _warmup(steps: int, kind: str) -> dict[str, bool]:
    return {
        f"warmup_num_steps of at least 1, found {steps}": steps >= 1,
        f"warmup_type {LINEAR!r} or {LOG!r}, found {kind!r}": kind in (LINEAR, LOG),
    }


def _check(name: str, expected: dict[str, bool]) -> None:
    """Raise PlanError with every expectation that does not hold."""
    broken = [text for text, holds in expected.items() if not holds]
    if broken:
        raise PlanError(f"scheduler {name}: expected {'; '.join(broken)}")
