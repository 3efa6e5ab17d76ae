"""From how many ranks on a model fits without an offload, where it does not with those that were asked about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from orchestrator.planning.point import Point
from orchestrator.report.summary import Row
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.rough_time import offloads

Enough = Mapping[str, int | None]
MOST_RANKS = 1024


def enough_ranks(points: Sequence[Point], fits: Sequence[Fit], fits_of: Callable[..., list[Fit]]) -> Enough:
    """The number, by the row's label, for each described machine on which no row without an offload fits; None if
    MOST_RANKS are too few. fits: the settled rows of the points; fits_of: how rows are counted."""
    found = {}
    for node in dict.fromkeys(one.config.hardware for one in fits if one.config.hardware.is_described):
        rows = [one for one in fits if one.config.hardware == node and not offloads(one.config)]
        if rows and not any(one.micro and not one.tight for one in rows):
            label = min(rows, key=lambda one: one.peak.total).label
            found[label] = _least(next(one for one in points if one.label == label), fits_of)
    return found


def _least(point: Point, fits_of: Callable[..., list[Fit]]) -> int | None:
    """In whole nodes with as many ranks as the point's, at its micro-batch if the line gives one, else at 1."""
    resources = point.config.resources
    per_node = resources.ranks // resources.nodes

    def has_room(nodes: int) -> bool:
        more = replace(resources, ranks=per_node * nodes, nodes=nodes)
        (one,) = fits_of([replace(point, config=replace(point.config, resources=more))], quiet=True, settle=list)
        return bool(one.micro) and one.at(one.given or 1).used_bytes[1] <= one.limit_bytes

    low, high = resources.nodes, resources.nodes + 1
    while not has_room(high):
        low, high = high, 2 * high
        if high * per_node > MOST_RANKS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_room(middle) else (middle, high)
    return high * per_node


def rows(found: Enough) -> list[Row]:
    """What is said below the row to take."""
    few = f"does not fit with {MOST_RANKS:,} ranks either"
    told = [f"{f'fits from {ranks:,} ranks on' if ranks else few} ({label})" for label, ranks in found.items()]
    return [Row("ranks", f"without an offload it {text}") for text in told]
