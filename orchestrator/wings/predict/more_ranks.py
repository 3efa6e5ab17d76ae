"""From how many ranks on a model fits without an offload, where it does not with those that were asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from orchestrator.config.schema import RunConfig
from orchestrator.planning.point import Point
from orchestrator.report.summary import Row
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.rough_time import offloads
from orchestrator.wings.predict.step import with_micro

MOST_RANKS = 1024


class Enough(NamedTuple):
    """A row without an offload, and the least number of ranks with which it fits; 0 if MOST_RANKS are too few."""

    label: str
    ranks: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        return {"label": self.label, "ranks": self.ranks or None}


def enough(points: Sequence[Point], fits: Sequence[Fit], fits_of: Callable[..., list[Fit]]) -> list[Enough]:
    """The number for each described machine on which no row without an offload fits. fits: the settled rows of the
    points; fits_of: how rows are counted."""
    found = []
    for node in dict.fromkeys(one.config.hardware for one in fits if one.config.hardware.is_described):
        rows = [one for one in fits if one.config.hardware == node and not offloads(one.config)]
        if rows and not any(one.micro and not one.tight for one in rows):
            least = min(rows, key=lambda one: one.peak.total)
            point = next(one for one in points if one.label == least.label)
            found.append(Enough(point.label, _least_ranks(point, fits_of)))
    return found


def _least_ranks(point: Point, fits_of: Callable[..., list[Fit]]) -> int:
    """In whole nodes with as many ranks as the point's, at its micro-batch if the line gives one, else at 1."""
    resources = point.config.resources
    per_node = resources.ranks // resources.nodes

    def has_room(nodes: int) -> bool:
        (one,) = fits_of([replace(point, config=_on_nodes(point.config, nodes))], quiet=True, settle=list)
        return bool(one.micro) and one.at(one.given or 1).used_bytes[1] <= one.limit_bytes

    low, high = resources.nodes, resources.nodes + 1
    while not has_room(high):
        low, high = high, 2 * high
        if high * per_node > MOST_RANKS:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_room(middle) else (middle, high)
    return high * per_node


def _on_nodes(config: RunConfig, nodes: int) -> RunConfig:
    per_node = config.resources.ranks // config.resources.nodes
    more = replace(config, resources=replace(config.resources, ranks=per_node * nodes, nodes=nodes))
    return with_micro(more, config.batch.micro)


def rows(found: Sequence[Enough]) -> list[Row]:
    """What is said below the row to take."""
    few = f"does not fit with {MOST_RANKS:,} ranks either"
    told = [f"{f'fits from {one.ranks:,} ranks on' if one.ranks else few} ({one.label})" for one in found]
    return [Row("ranks", f"without an offload it {text}") for text in told]
