"""Quantiles of Student's t distribution, for means of few rounds. Pure, and the same on every machine.

The probability within ±t is a finite sum for whole degrees of freedom (Abramowitz and Stegun, Handbook of Mathematical
Functions, 26.7.3 and 26.7.4); the quantile is found by halving an interval.
"""

from __future__ import annotations

import math

HALVINGS = 60  # of an angle: to its last bit


def quantile(probability: float, freedom: int) -> float:
    """The t below which T with `freedom` degrees of freedom lies with this probability, from 0.5 up to below 1."""
    low, high = 0.0, math.pi / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _below(angle: float, freedom: int) -> float:
    """P(T < t) for t = sqrt(freedom) * tan(angle)."""
    cosine, is_odd = math.cos(angle), freedom % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for power in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (power - 1) / power
    within = math.sin(angle) * total
    return 0.5 + ((angle + within) / math.pi if is_odd else within / 2)
