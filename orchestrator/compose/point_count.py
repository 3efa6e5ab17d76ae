"""Counts the points of a sweep from its axes, so that an unreasonable product is refused before it is expanded."""

from __future__ import annotations

import math
from collections.abc import Sequence

LIMIT = 10_000
FLAG = "--max-points"


class TooManyPoints(ValueError):
    """A sweep has more points than are allowed; the message is one line."""


def check(counts: Sequence[tuple[str, int]], limit: int, more: int = 0) -> None:
    """Raises TooManyPoints above `limit` points.

    counts: the number of values of each axis. more: the number of points in addition to the product of the axes.
    """
    points = math.prod(count for _, count in counts) + more
    if points > limit:
        axes = " x ".join(f"{count:,} of {key}" for key, count in counts if count > 1)
        raise too_many(limit, f"{points:,} ({axes}{f' + {more:,} listed' if more else ''})")


def too_many(limit: int, found: str) -> TooManyPoints:
    """The error for a sweep of more points than `limit`."""
    return TooManyPoints(
        f"expected a sweep of at most {limit:,} points, found {found}; give fewer values, or allow more with {FLAG} N"
    )
