"""From how many ranks on a model fits without an offload, where it does not with those that were asked about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from orchestrator.planning.point import Point
from orchestrator.report.summary import Row
from orchestrator.wings.predict.fit_rows import Fit, order
from orchestrator.wings.predict.rough_time import offloads

Enough = Mapping[str, int | None]
MOST_RANKS = 1024


def enough_ranks(points: Sequence[Point], fits: Sequence[Fit], fits_of: Callable[..., list[Fit]]) -> Enough:
    """The number, by the label of a row that fits then, for each described machine on which no row without an offload
    fits; None if MOST_RANKS are too few. fits: the settled rows of the points; fits_of: how rows are counted."""
    found: dict[str, int | None] = {}
    for node in dict.fromkeys(one.config.hardware for one in fits if one.config.hardware.is_described):
        rows = [one for one in fits if one.config.hardware == node and not offloads(one.config)]
        if rows and not any(one.micro and not one.tight for one in rows):
            labels = {one.label for one in rows}
            label, ranks = _least([one for one in points if one.label in labels], fits_of)
            found[label] = ranks
    return found


def _least(points: Sequence[Point], fits_of: Callable[..., list[Fit]]) -> tuple[str, int | None]:
    """In whole nodes with as many ranks as the points', at their micro-batch if the line gives one, else at 1."""
    resources = points[0].config.resources
    per_node, low, high = resources.ranks // resources.nodes, resources.nodes, resources.nodes + 1

    def fitting(nodes: int) -> str:
        more = replace(resources, ranks=per_node * nodes, nodes=nodes)
        larger = [replace(point, config=replace(point.config, resources=more)) for point in points]
        fits = [one for one in fits_of(larger, quiet=True, settle=order) if one.micro]
        return next((one.label for one in fits if one.at(one.given or 1).used_bytes[1] <= one.limit_bytes), "")

    while not (label := fitting(high)):
        low, high = high, 2 * high
        if high * per_node > MOST_RANKS:
            return points[0].label, None
    while high - low > 1:
        middle = (low + high) // 2
        found = fitting(middle)
        low, high, label = (low, middle, found) if found else (middle, high, label)
    return label, high * per_node


def rows(found: Enough) -> list[Row]:
    """The lines below the row to take."""
    few = f"does not fit with {MOST_RANKS:,} ranks either"
    told = [f"{f'fits from {ranks:,} ranks on' if ranks else few} ({label})" for label, ranks in found.items()]
    return [Row("ranks", f"without an offload it {text}") for text in told]
