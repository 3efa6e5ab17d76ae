"""The loss scale of fp16 training, as an immutable value that changes by a published rule. Standard library only.

The rule is dynamic loss scaling as in arXiv 1710.03740 (section 3.2) with DeepSpeed's hysteresis: an overflow uses up
one unit of hysteresis, or halves the scale if only one unit is left; `window` steps in a row without overflow double
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zero_runtime.errors import PlanError

FACTOR = 2.0
LARGEST_POWER = 127


@dataclass(frozen=True)
class LossScaleRule:
    """How a loss scale starts and changes; `static` fixes it (1.0 for every dtype but fp16)."""

    static: float | None = None
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if self.static is not None and not (math.isfinite(self.static) and self.static > 0):
            raise PlanError(f"loss_scale.static: expected a finite number above 0, found {self.static}")
        for name in ("window", "hysteresis"):
            if vars(self)[name] < 1:
                raise PlanError(f"loss_scale.{name}: expected at least 1, found {vars(self)[name]}")
        if not -LARGEST_POWER <= self.initial_power <= LARGEST_POWER:
            raise PlanError(f"loss_scale.initial_power: expected at most {LARGEST_POWER}, which fp32 holds, found more")
        if not (math.isfinite(self.minimum) and self.minimum > 0):
            raise PlanError(f"loss_scale.minimum: expected a finite number above 0, found {self.minimum}")
        if self.static is None and 2.0**self.initial_power < self.minimum:
            raise PlanError(
                f"loss_scale: 2^initial_power = {2.0**self.initial_power:g} is below minimum = {self.minimum:g}; "
                "raise initial_power or lower minimum"
            )

    def start(self) -> LossScaler:
        """The scaler before the first step."""
        scale = 2.0**self.initial_power if self.static is None else self.static
        return LossScaler(self, scale, self.hysteresis)


UNSCALED = LossScaleRule(static=1.0)


@dataclass(frozen=True)
class LossScaler:
    """The current scale, and the counters that decide its next change. `steps` counts all steps, also skipped ones."""

    rule: LossScaleRule
    scale: float
    hysteresis_left: int
    steps: int = 0
    last_overflow: int = -1

    @property
    def exhausted(self) -> bool:
        """Whether the scale can no longer be lowered after another overflow, so that skipping steps would never end."""
        return self.rule.static is not None or (self.scale <= self.rule.minimum and self.hysteresis_left == 1)

    def after(self, *, overflow: bool) -> LossScaler:
        """The scaler after one step. `overflow`: whether gradients overflowed on any rank."""
        moved = self
        if self.rule.static is None:
            moved = self._after_overflow() if overflow else self._after_good_step()
        return replace(moved, steps=self.steps + 1)

    def _after_overflow(self) -> LossScaler:
        if self.hysteresis_left > 1:
            return replace(self, hysteresis_left=self.hysteresis_left - 1, last_overflow=self.steps)
        return replace(self, scale=max(self.scale / FACTOR, self.rule.minimum), last_overflow=self.steps)

    def _after_good_step(self) -> LossScaler:
        grown = (self.steps - self.last_overflow) % self.rule.window == 0
        refilled = self.rule.consecutive_hysteresis or grown
        return replace(
            self,
            scale=self.scale * FACTOR if grown else self.scale,
            hysteresis_left=self.rule.hysteresis if refilled else self.hysteresis_left,
        )
