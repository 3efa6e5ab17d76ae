"""The micro-batch of points with batch.at_limit: each engine at its own limit, with the same global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.config.strict import Broken
from orchestrator.planning.point import Point, Refused
from orchestrator.wings.predict.at_limit import largest_micros
from orchestrator.wings.predict.step import with_share

RULE = "batch.at_limit needs a prediction of the memory of a rank, and its limit"


def chosen(points: Sequence[Point | Refused]) -> tuple[list[Point | Refused], list[Broken]]:
    """The points, of which those with batch.at_limit have the largest micro-batch that is predicted to fit, and the
    rules that some break. Where nothing fits it is 1, and the plan says that it cannot fit."""
    asked = [point for point in points if isinstance(point, Point) and point.config.batch.at_limit]
    micros = dict(zip((point.label for point in asked), largest_micros([one.config for one in asked]), strict=True))
    judged: list[Point | Refused] = []
    broken: list[Broken] = []
    for point in points:
        micro = micros.get(point.label) if isinstance(point, Point) else None
        if isinstance(point, Point) and isinstance(micro, int):
            judged.append(replace(point, config=with_share(point.config, micro)))
        elif micro is None:
            judged.append(point)
        else:
            broken.append(Broken(RULE, str(micro), ("batch.at_limit=false",)))
            judged.append(Refused(point.label, point.overrides, (broken[-1],)))
    return judged, broken
