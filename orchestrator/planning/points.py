"""Turns a composition into points: each is checked against the rules, then resolved for this machine or refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator import wings
from orchestrator.compose.labels import label
from orchestrator.config.engine import EngineChoice
from orchestrator.config.schema import AskedConfig, root_limits
from orchestrator.config.strict import Broken, build_parts
from orchestrator.planning.point import Point, Refused
from orchestrator.planning.rules import table as rules
from orchestrator.planning.rules.scene import Scene
from orchestrator.planning.rules.training import option_is_not_undone

if TYPE_CHECKING:
    from orchestrator.compose.composition import Composition


def judged(composition: Composition, scene: Scene) -> tuple[list[Point | Refused], list[str]]:
    """The points, resolved or refused, and one line for each broken rule with the number of points that break it."""
    points: dict[str, Point | Refused] = {}
    hits: Counter[Broken] = Counter()
    for composed in composition.points:
        parts, broken = build_parts(AskedConfig, composed.values)
        broken += root_limits(parts).broken + rules.check_parts(parts, scene)
        undone = "measure" in parts and option_is_not_undone(composed.choices.get("measure"), parts["measure"])
        broken += [undone] if undone else []
        hits.update(dict.fromkeys(broken, 1))
        name = label(composed, composition.axes)
        if broken:
            points[f"refused {name} {composed.overrides}"] = Refused(name, composed.overrides, tuple(broken))
        else:
            config = rules.resolve(AskedConfig(**parts), scene)
            # Different overrides with the same configuration are one point, which is measured once.
            points.setdefault(json.dumps(config.as_plain, sort_keys=True), Point(name, config, composed.overrides))
    judged_points = list(points.values())
    if any(isinstance(one, Point) and one.config.engine != EngineChoice() for one in judged_points):
        judged_points, more = wings.load(wings.COMPARE_ENGINES)(judged_points, scene)
        hits.update(more)
    if any(isinstance(one, Point) and one.config.batch.at_limit for one in judged_points):
        judged_points, more = wings.load(wings.AT_LIMIT)(judged_points)
        hits.update(more)
    many = len(composition.points)
    lines = [f"{rule}" + (f"      ({count} of {many} points)" if many > 1 else "") for rule, count in hits.items()]
    return distinct(judged_points), lines


def distinct(points: Sequence[Point | Refused]) -> list[Point | Refused]:
    """The points with unique labels: a number is added to a label that occurs again."""
    seen: Counter[str] = Counter()
    named = []
    for point in points:
        seen[point.label] += 1
        many = seen[point.label] > 1
        named.append(replace(point, label=f"{point.label}-{seen[point.label]}") if many else point)
    return named


def checked_points(composition: Composition, scene: Scene) -> tuple[list[Point], list[str]]:
    """The points that break no rule, and the lines of `judged` about the others."""
    points, lines = judged(composition, scene)
    return [point for point in points if isinstance(point, Point)], lines
