"""What the points of a comparison of engines need before they run: rules, the same work to count, and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator import wings
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Broken
from orchestrator.plan.point import Point, Refused
from orchestrator.plan.rules.scene import Scene
from orchestrator.wings.engines import environments
from orchestrator.wings.engines.contract import EngineModule


def completed(points: Sequence[Point | Refused], scene: Scene) -> tuple[list[Point | Refused], list[Broken]]:
    """The points, of which those that their engine cannot train are refused; and the rules that these break, one for
    each point. Each other point counts its work."""
    judged = [_judged(point) if isinstance(point, Point) else point for point in environments.known(points, scene)]
    broken = [rule for before, after in zip(points, judged, strict=True) if after is not before
              and isinstance(after, Refused) for rule in after.broken]  # fmt: skip
    return _distinct([_counted(point) for point in judged]), broken


def module_of(config: RunConfig) -> EngineModule:
    """The module of the point's engine, which is not zero-lab's own."""
    found: EngineModule = wings.load(wings.ENGINES[config.engine.kind])
    return found


def _judged(point: Point) -> Point | Refused:
    if point.config.engine.is_own:
        return point
    engine = module_of(point.config)
    if broken := engine.problems_of(point.config):
        return Refused(point.label, point.overrides, tuple(broken))
    return replace(point, config=engine.meaning(point.config))


def _counted(point: Point | Refused) -> Point | Refused:
    """The point, whose run counts its work, without the settings of engines that do not train it."""
    if isinstance(point, Refused):
        return point
    engine = point.config.engine
    others: dict[str, Any] = {kind: {} for kind in wings.ENGINES if kind != engine.kind and hasattr(engine, kind)}
    return replace(point, config=replace(point.config, engine=replace(engine, counted=True, **others)))


def _distinct(points: Sequence[Point | Refused]) -> list[Point | Refused]:
    """Points whose configurations are equal by now are one."""
    found: list[Point | Refused] = []
    for point in points:
        if isinstance(point, Refused) or all(point.config != one.config for one in found if isinstance(one, Point)):
            found.append(point)
    return found
