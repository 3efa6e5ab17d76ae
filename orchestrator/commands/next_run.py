"""The command that is proposed after a run: the same under every stage that takes its other settings, or under ours."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.schema import MeasureKind
from orchestrator.config.strict import Refusal
from orchestrator.planning.point import Point
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import Scene, here
from orchestrator.report.ranking import longer, standard
from orchestrator.report.summary import without_key
from orchestrator.text.paths import program

STAGES = "zero=stage0,stage1,stage2,stage3"


def next_after_run(point: Point, scene: Scene | None = None) -> str:
    """A useful next command after one run. Offloaded parameters, quantised messages and evaluations, for example, are
    refused by some stages; if one stage alone takes the settings, the run is measured longer.

    scene: this process's, if it is None.
    """
    if not point.config.engine.is_own:  # the next question is how it compares with zero-lab's own runtime
        words = standard(without_key(point.overrides, "engine", "engine.kind", "sweeps"))
        return " ".join([program(), shlex.join(["-m", f"engine=zero,{point.config.engine.kind}", *words])])
    others = without_key(point.overrides, "zero", "zero.stage", "sweeps")
    stages = _stages(others, here() if scene is None else scene)
    if len(stages) > 1:
        return " ".join([program(), shlex.join(["-m", "zero=" + ",".join(stages), *others])])
    return longer(point.overrides, evaluates=point.config.measure.kind is MeasureKind.eval)


def _stages(others: Sequence[str], scene: Scene) -> list[str]:
    """The options of the group zero with which the other overrides are a valid point."""
    try:
        found, _ = judged(composed(arguments.split(["--multirun", STAGES, *others])), scene)
    except Refusal:  # a file of settings has changed since the run began
        return []
    return [f"stage{one.config.zero.stage}" for one in found if isinstance(one, Point)]
