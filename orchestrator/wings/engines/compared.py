"""What the points of a comparison of engines need before they run: rules, the same work to count, and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator import wings
from orchestrator.compose import arguments
from orchestrator.compose.labels import environment_name
from orchestrator.compose.line import composed
from orchestrator.config.schema import MOST_THREADS, RunConfig, to_dict
from orchestrator.config.strict import Broken
from orchestrator.planning.point import Point, Refused
from orchestrator.planning.points import judged as judged_points
from orchestrator.planning.rules.scene import Scene
from orchestrator.wings.engines import environments
from orchestrator.wings.engines.contract import EngineModule
from orchestrator.wings.engines.equality import REFERENCE, STEPS, work_key

PYTHON = "engine.python"
# Groups that decide where and how a point is trained, which a plain run has no part in.
NOT_THE_WORK = {
    **dict.fromkeys(("offload", "recompute", "parallel", "checkpoint"), "none"),
    **{"loss": "full", "batch.at_limit": "false", "resources.code": "null"},
}


def completed(points: Sequence[Point | Refused], scene: Scene) -> tuple[list[Point | Refused], list[Broken]]:
    """The points, of which those that their engine cannot train are refused; and the rules that these break, one for
    each. Each other point counts its work. Several points get the plain runs first, with which they are compared.
    """
    judged = [_judged(point) if isinstance(point, Point) else point for point in environments.known(points, scene)]
    broken = [rule for before, after in zip(points, judged, strict=True) if after is not before
              and isinstance(after, Refused) for rule in after.broken]  # fmt: skip
    counted = [_counted(point) for point in judged]
    return _distinct([*_references(counted, scene), *counted]), broken


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
    meant = engine.meaning(point.config)
    label = point.label.replace(f"stage{point.config.zero.stage}", f"stage{meant.zero.stage}")
    return replace(point, label=label, config=meant)


def _counted(point: Point | Refused) -> Point | Refused:
    """The point, whose run counts its work, without the settings of engines that do not train it."""
    if isinstance(point, Refused):
        return point
    engine, measure = point.config.engine, point.config.measure
    measure = replace(measure, warmup_steps=max(measure.warmup_steps, STEPS))  # so that no measured step is counted
    others: dict[str, Any] = {kind: {} for kind in wings.ENGINES if kind != engine.kind and hasattr(engine, kind)}
    versions = engine.versions or environments.packages_in(engine.python, ("torch",)).versions
    counted = replace(engine, counted=True, versions=versions, **others)
    return replace(point, config=replace(point.config, engine=counted, measure=measure))


def _references(points: Sequence[Point | Refused], scene: Scene) -> list[Point | Refused]:
    """A plain run on one rank for each distinct work among several points, which has none yet."""
    found = [point for point in points if isinstance(point, Point)]
    asking = [point for point in reversed(found) if point.config.measure.reference]
    works = {work_key(to_dict(point.config)): point for point in asking}
    for point in found:
        if point.config.engine.kind == REFERENCE:
            works.pop(work_key(to_dict(point.config)), None)
    if len(found) < 2:
        return []
    words = [_reference_words(point) for point in reversed(works.values())]
    common = set.intersection(*map(set, words)) if words else set()
    references: list[Point | Refused] = []
    for one in words:
        # Composed anew, so that its words repeat it.
        judged, _ = judged_points(composed(arguments.split(one)), scene)
        told = [word.partition("=")[::2] for word in one if word not in common]
        label = "-".join([REFERENCE, *(environment_name(value) if key == PYTHON else value for key, value in told)])
        references += [replace(point, label=label) for point in judged]
    return references


def _reference_words(point: Point) -> list[str]:
    """The words of a plain run that does the same work: on one rank with the threads of all, in micro-batches of the
    same size. It is measured in one round, so it takes no turns with the points that are compared in speed."""
    config, resources = point.config, point.config.resources
    own = {
        "engine": REFERENCE,
        "zero": "stage0",
        "resources.ranks": 1,
        "resources.nodes": 1,
        "resources.threads": min(MOST_THREADS, resources.threads * resources.ranks),
        "batch.micro": config.batch.micro,
        "batch.accumulation": "null",
        "batch.global_size": config.batch.global_size,
        "measure.rounds": 1,
        "measure.min_s": 0,
        "measure.validation_batches": 0,
        "measure.profile": "false",
        **NOT_THE_WORK,
    }
    kept = [word for word in point.overrides if _is_of(word, (PYTHON,)) or not _is_of(word, tuple(own))]
    return [*kept, *(f"{key}={value}" for key, value in own.items())]


def _is_of(word: str, names: Sequence[str]) -> bool:
    """Whether an override sets one of these groups or keys, or a key of one of the groups."""
    key = word.lstrip("+~").partition("=")[0].partition("@")[0]
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _distinct(points: Sequence[Point | Refused]) -> list[Point | Refused]:
    """Points whose configurations are equal by now are one."""
    found: list[Point | Refused] = []

    def meant(point: Point | Refused) -> RunConfig | Refused:
        return point.config if isinstance(point, Point) else point

    for point in points:
        if meant(point) not in map(meant, found):
            found.append(point)
    return found
