"""What the parts of a step cost on one kind of machine, in seconds. Standard library only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Seconds by size, through measured points in the order of their sizes, with straight lines between them.

    Below the first point it is constant, and above the last one it continues the last line, unless that falls: measured
    points scatter, and a larger size does not take less time.
    """

    points: Sequence[tuple[float, float]]

    @classmethod
    def of_rate(cls, latency_s: float, per_second: float) -> Curve:
        """A latency, and a constant rate."""
        return cls([(0.0, latency_s), (per_second, latency_s + 1.0)])

    def at(self, size: float) -> float:
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        place = min(max(bisect_left(points, size, key=lambda point: point[0]), 1), len(points) - 1)
        (left, low), (right, high) = points[place - 1], points[place]
        if size > right:
            return high + max(high - low, 0.0) * (size - right) / (right - left)
        return low + (high - low) * (size - left) / (right - left)


FREE = Curve([(0.0, 0.0)])


@dataclass(frozen=True)
class CollectiveCost:
    """A kind of collective by the bytes of its full tensor: the time in which a rank begins it and cannot compute, and
    the time from then until its result can be used, if the rank waits."""

    start: Curve = FREE
    rest: Curve = FREE


@dataclass(frozen=True)
class StepCosts:
    """The costs of everything in a step but the model's own segments.

    gather, reduce: of an all-gather and a reduce-scatter in the shard group. replica: of an all-reduce over the
    replicas of a shard. surplus_s: what a real step takes in addition to the sum of its parts, for each exchange of
    messages (ranks wait for each other, and what moves the messages uses the processor and its caches), or for each
    micro-batch of a step without exchanges. control_s: of the sum of a few numbers over all ranks, which blocks. copy:
    of a copy or cast, by the bytes read and written. update: of the optimizer's step without that sum, by the elements
    that a rank updates. compute_slowdown: by how much computing takes longer while a collective is under way, and
    link_slowdown: by how much a collective takes longer while the rank computes; 0.5 is half as long again. unhidden:
    the share of the time of collectives beside computing that a step takes in addition.

    fetch, send: of a shard from where it is offloaded to the device, and back, by its bytes. host_update: of an update
    outside of the device, by the elements that a rank updates; None if `update` includes it.
    """

    gather: CollectiveCost = CollectiveCost()
    reduce: CollectiveCost = CollectiveCost()
    replica: CollectiveCost = CollectiveCost()
    surplus_s: float = 0.0
    control_s: float = 0.0
    copy: Curve = FREE
    update: Curve = FREE
    compute_slowdown: float = 0.0
    link_slowdown: float = 0.0
    unhidden: float = 0.0
    fetch: Curve = FREE
    send: Curve = FREE
    host_update: Curve | None = None
