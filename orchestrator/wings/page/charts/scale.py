"""Axes: round numbers for ticks, their text and unit, and the pixel of a value. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

STEPS = (1, 2, 2.5, 5, 10)


class AxisUnit(NamedTuple):
    """The unit of an axis. divisor: the number of base units in one of it."""

    name: str
    divisor: float = 1.0


def size_unit(largest_bytes: float) -> AxisUnit:
    """The unit in which sizes of up to this many bytes are short numbers; 1 GiB = 2^30 bytes."""
    for name, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest_bytes >= divisor:
            return AxisUnit(name, divisor)
    return AxisUnit("bytes")


def tick_step(span: float, wanted: int) -> float:
    """The smallest round step that needs at most `wanted` of it for the span; 1 for a span that has none."""
    if not 0 < span < math.inf:
        return 1.0
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in STEPS if step * power >= rough * (1 - 1e-9))


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high, both included if they are round themselves; none if they are not finite."""
    if not math.isfinite(high - low):
        return []
    step = tick_step(high - low, wanted)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, step: float) -> str:
    """The number with as many decimals as the step has."""
    decimals = next((places for places in range(7) if abs(round(step, places) - step) < 1e-9 * step), 6)
    text = f"{value:,.{decimals}f}"
    return text.lstrip("-") if float(text.replace(",", "")) == 0 else text


@dataclass(frozen=True)
class Scale:
    """Maps values from low to high to pixels from start to end."""

    low: float
    high: float
    start_px: float
    end_px: float

    def at(self, value: float) -> float:
        """The pixel of a value; of the nearer end for one that is outside."""
        inside = min(max(value, self.low), self.high)
        return self.start_px + (inside - self.low) / (self.high - self.low) * (self.end_px - self.start_px)


def padded_range(values: list[float], *, from_zero: bool = False) -> tuple[float, float]:
    """A range that holds all values with some room, and is not empty."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (0.0 if from_zero and low >= 0 else low - room), high + room
