"""The loss scale of fp16 training, as an immutable value that changes by a published rule. Standard library only.

The rule is dynamic loss scaling as in arXiv 1710.03740 (section 3.2) with the counts of DeepSpeed 0.19.8: an overflow
uses up one unit of hysteresis, or halves the scale if only one unit is left; a step without overflow doubles it if
`window` such steps, or a multiple of it, came between the last overflow and this one. The command line has the same
rule as the drop-in, so that a script and the experiment imported from its settings train alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from zero_runtime.limits import Limits, keyed

FACTOR = 2.0
LARGEST_POWER = 127


@dataclass(frozen=True)
class LossScaleRule:
    """How a loss scale starts and changes; `static` fixes it (1.0 for every dtype but fp16).

    Its fields are settings of the group `precision` (see limits.py), with the names that DeepSpeed has for them.
    """

    static: float | None = field(default=None, metadata=keyed("loss_scale"))
    initial_power: int = field(default=16, metadata=keyed("initial_scale_power"))
    window: int = field(default=1000, metadata=keyed("loss_scale_window"))
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = field(default=1.0, metadata=keyed("min_loss_scale"))

    def __post_init__(self) -> None:
        limits = Limits.of(self, "precision")
        limits.must("loss_scale", _is_scale, "a finite number above 0, or null for a dynamic scale")
        low, high = -LARGEST_POWER, LARGEST_POWER
        limits.must(
            "initial_scale_power", lambda value: low <= value <= high, f"from {low} to {high}, which fp32 holds"
        )
        limits.at_least(1, "loss_scale_window", "hysteresis")
        limits.must("min_loss_scale", _is_scale, "a finite number above 0")
        limits.conclude()
        start = 2.0**self.initial_power
        if self.static is None and start < self.minimum:
            rule = f"precision.min_loss_scale must be at most 2^initial_scale_power = {start:g}"
            limits.refuse(rule, self.minimum, f"precision.min_loss_scale={start}")
        limits.conclude()

    def start(self) -> LossScaler:
        """The scaler before the first step."""
        scale = 2.0**self.initial_power if self.static is None else self.static
        return LossScaler(self, scale, self.hysteresis)


def _is_scale(value: float) -> bool:
    return math.isfinite(value) and value > 0


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
        earlier = self.steps - self.last_overflow - 1  # good steps in a row before this one
        grown = earlier > 0 and earlier % self.rule.window == 0
        refilled = self.rule.consecutive_hysteresis or grown
        return replace(
            self,
            scale=self.scale * FACTOR if grown else self.scale,
            hysteresis_left=self.rule.hysteresis if refilled else self.hysteresis_left,
        )
