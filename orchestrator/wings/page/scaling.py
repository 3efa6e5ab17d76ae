"""How throughput grows with the number of ranks, against the smallest number that was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.text.units import grouped
from orchestrator.wings.page.report_points import ReportPoint, group_of, length

# Settings that follow the number of ranks: points that differ only in these are one series.
FOLLOWING = {"resources": ("ranks", "nodes", "threads"), "batch": ("global_size", "accumulation", "micro")}
MOST_RANKS = 10**9  # a damaged record may have any number
WEAK, STRONG = "weak", "strong"
WORDS = {
    WEAK: "weak scaling: the batch of a rank is the same",
    STRONG: "strong scaling: the batch of all ranks is the same",
}


@dataclass(frozen=True)
class Scaling:
    """Points that differ in their number of ranks, by that number. kind: a key of WORDS. base: the first of them."""

    kind: str
    points: tuple[ReportPoint, ...]

    @property
    def base(self) -> ReportPoint:
        return self.points[0]

    def efficiency(self, point: ReportPoint) -> tuple[float, float, float]:
        """tokens/s of a rank as a share of that of a rank of the base, between the ends of its range."""
        base, speed = self.base.speed, point.speed
        assert base is not None
        assert speed is not None
        each = base / world_of(self.base) * world_of(point)
        low, high = point.speed_range or (speed, speed)
        return low / each, speed / each, high / each


def world_of(point: ReportPoint) -> int:
    """The number of ranks of a measured point, at least 1 and small enough to calculate with."""
    assert point.result is not None
    return min(max(int(point.result["world"]), 1), MOST_RANKS)


def scalings(points: Sequence[ReportPoint]) -> list[Scaling]:
    """The series of measured points that differ in nothing but the number of ranks and what follows it, the longest
    first."""
    measured = [point for point in points if point.speed is not None and point.entry.config]
    groups = grouped((repr(_without_ranks(point.entry.config)), point) for point in measured)
    series = [one for group in groups.values() for one in _split(group)]
    found = [Scaling(kind, tuple(sorted(members, key=world_of))) for kind, members in series]
    return sorted(found, key=lambda one: (-len(one.points), one.kind != WEAK))


def _split(group: Sequence[ReportPoint]) -> list[tuple[str, list[ReportPoint]]]:
    """The strong and the weak series of a group."""
    tokens = [(length(group_of(point.result, "batch").get("tokens_per_step")), point) for point in group]
    by_all = grouped(tokens)
    by_rank = grouped((one / world_of(point), point) for one, point in tokens)
    kinds = ((STRONG, by_all.values()), (WEAK, by_rank.values()))
    return [(kind, members) for kind, several in kinds for members in several if _is_series(members)]


def _is_series(members: Sequence[ReportPoint]) -> bool:
    worlds = [world_of(point) for point in members]
    return len(worlds) > 1 and len(set(worlds)) == len(worlds)


def _without_ranks(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what follows the number of ranks."""
    return {
        group: {key: value for key, value in content.items() if key not in FOLLOWING[group]}
        if group in FOLLOWING and isinstance(content, Mapping)
        else content
        for group, content in config.items()
    }


def baseline_text(points: Sequence[ReportPoint]) -> str:
    """What the speeds can be compared with: whether a point without sharding and a point of one rank were measured."""
    measured = [point for point in points if point.result is not None]
    plain = [point.label for point in measured if _is_replicated(point)]
    single = [point.label for point in measured if world_of(point) == 1]
    texts = [
        f"without sharding: {', '.join(plain[:3])}" if plain else "none without sharding (zero=stage0) was measured",
        f"on one rank: {', '.join(single[:3])}" if single else "none on one rank was measured",
    ]
    return "; ".join(texts)


def _is_replicated(point: ReportPoint) -> bool:
    return group_of(point.entry.config, "zero").get("stage") == 0
