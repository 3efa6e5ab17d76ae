"""Learning rates as functions of the step: warm-up, then constant or half a cosine. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_runtime.errors import PlanError

KINDS = ("constant", "warmup", "cosine")


@dataclass(frozen=True)
class LrSchedule:
    """`rate(step)` for step = 0, 1, ... (the number of updates already made).

    constant: peak_lr. warmup (WarmupLR): peak_lr * (step + 1) / warmup_steps, then peak_lr.
    cosine: the same warm-up, then half a cosine from peak_lr to min_ratio * peak_lr, reached at the last of
    total_steps updates (arXiv 1608.03983, equation 5, without restarts).
    """

    kind: str
    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"scheduler.kind: expected one of {KINDS}, found {self.kind!r}")
        if self.peak_lr < 0 or self.warmup_steps < 0 or not 0 <= self.min_ratio <= 1:
            raise PlanError(
                "scheduler: expected peak_lr >= 0, warmup_steps >= 0 and min_ratio in [0, 1], found "
                f"{self.peak_lr}, {self.warmup_steps} and {self.min_ratio}"
            )

    def rate(self, step: int) -> float:
        if self.kind == "constant":
            return self.peak_lr
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.kind == "warmup":
            return self.peak_lr
        span = max(self.total_steps - 1 - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / span, 1.0)
        return self.peak_lr * (self.min_ratio + (1 - self.min_ratio) * (1 + math.cos(math.pi * progress)) / 2)
