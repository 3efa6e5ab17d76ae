"""Counts the points of a sweep from its axes, so that an unreasonable product is refused before it is expanded."""

from __future__ import annotations

import math
from collections.abc import Mapping

LIMIT = 10_000
FLAG = "--max-points"


class TooManyPoints(ValueError):
    """A sweep has more points than are allowed; the message is one line."""


def check(counts: Mapping[str, int], limit: int, more: int = 0) -> None:
    """Raises TooManyPoints above `limit` points.

    counts: the number of values of each axis. more: the number of points in addition to the product of the axes.
    """
    points = math.prod(counts.values()) + more
    if points <= limit:
        return
    axes = " x ".join(f"{count:,} of {key}" for key, count in counts.items() if count > 1)
    listed = f" + {more:,} listed" if more else ""
    raise TooManyPoints(
        f"expected a sweep of at most {limit:,} points, found {points:,} ({axes}{listed}); give fewer values, or ask "
        f"for so many with {FLAG} {points}"
    )


def of_range(start: float, stop: float, step: float) -> int:
    """The number of values of range(start,stop,step). ValueError if an argument is not finite or the step is 0."""
    if not all(map(math.isfinite, (start, stop, step))) or step == 0:
        raise ValueError(f"range({start},{stop},{step}): expected finite numbers and a step that is not 0")
    if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
        return max(0, -((start - stop) // step))  # `len` of a range fails above 2^63
    return max(0, math.ceil((stop - start) / step))
