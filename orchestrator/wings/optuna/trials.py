"""Measures points that a program proposes: lines of overrides in, values of a metric out.

Each batch of lines is one sweep, so its points get slots, records and cached results like those of any other sweep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.commands import sweep as sweep_command
from orchestrator.compose import arguments
from orchestrator.compose.composition import Composition
from orchestrator.compose.labels import sweep_name
from orchestrator.compose.line import composed
from orchestrator.config.cluster import ClusterKind
from orchestrator.config.schema import to_dict
from orchestrator.config.strict import Refusal
from orchestrator.planning.point import Point, Refused, Wishes, retry_states
from orchestrator.planning.points import distinct, judged
from orchestrator.planning.rules.scene import Scene, here
from orchestrator.records import sweep_record
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Standing
from orchestrator.report import extras, ranking
from orchestrator.report.entry import Entry
from orchestrator.report.screen import Screen


@dataclass(frozen=True)
class Asked:
    """Settings of every batch. rank_by: a name in ranking.METRICS, which also orders the table.

    retry: states to run again, as for `--retry`.
    flags: `--config-dir`, if the lines were composed with it. fixed: overrides that are the same in every line of every
    batch and are therefore left out of a point's short name. study: the identity of a study whose batches are one
    sweep, to which each adds its lines; a batch then has the lines of all earlier ones first. command: what resumes it.
    began: when the first batch did.
    """

    rank_by: str = ranking.DEFAULT_METRIC
    retry: str = ""
    flags: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    study: str = ""
    command: tuple[str, ...] = ()
    began: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Trial:
    """The outcome of one line: the value of the metric if it was measured, else None, and `message` says why."""

    label: str
    state: RunState
    value: float | None = None
    message: str = ""
    folder: Path | None = None

    @property
    def diverged(self) -> bool:
        """Whether its loss was no longer finite."""
        return self.state is RunState.error and "NonFiniteError" in self.message

    @property
    def fits_not(self) -> bool:
        """Whether it is known that the point cannot run: out of memory, or refused."""
        return self.state.answered and not self.state.measured


def measure(lines: Sequence[Sequence[str]], asked: Asked, screen: Screen | None = None) -> list[Trial]:
    """One trial per line, in the order of the lines; returns when all have ended. Several lines may be the same point.
    screen: shows the progress.

    An interrupt cancels the batch and is raised again. Refusal: a line is not one point, or nothing can run from here.
    """
    scene = here()
    if scene.world is not None:
        raise Refusal(["a sweep starts its own processes: run it without torchrun or srun"])
    axes = _axes(lines, asked.fixed)
    outcomes = [_judged(composition, axes, scene) for composition in _composed(lines, asked)]
    # In a study the refused lines are rows as well: its report has all trials.
    points = {_key(outcome): outcome for outcome in outcomes if isinstance(outcome, Point) or asked.study}
    labels = dict(zip(points, (point.label for point in distinct(list(points.values()))), strict=True))
    named = [replace(point, label=labels[key]) for key, point in points.items()]
    can_run = any(isinstance(point, Point) for point in named)
    standings = _run(named, sweep_name(axes, ()), asked, scene, screen) if can_run else {}
    apart = extras.places().apart(
        [Entry(one.label, one.state, one.result, config=one.planned.config) for one in standings.values()]
    )
    return [
        _trial(standings[labels[_key(outcome)]], asked.rank_by, apart)
        if isinstance(outcome, Point)
        else _refused(outcome)
        for outcome in outcomes
    ]


def _axes(lines: Sequence[Sequence[str]], fixed: Sequence[str]) -> tuple[str, ...]:
    """The keys that every line sets, except those with a fixed value in every batch."""
    keys = [[word.partition("=")[0].lstrip("+~") for word in line if word not in fixed] for line in lines]
    return tuple(key for key in dict.fromkeys(keys[0]) if all(key in others for others in keys))


def _composed(lines: Sequence[Sequence[str]], asked: Asked) -> list[Composition]:
    """Each line as one point, not yet checked. Refusal: lists every line that is not one point."""
    compositions: list[Composition] = []
    wrong: list[str] = []
    for line in lines:
        try:
            composition = composed(arguments.split([*asked.flags, "--", *line]))
        except Refusal as refusal:
            wrong += refusal.problems
            continue
        if len(composition.points) > 1:
            wrong.append("a line that is proposed must be one point, and this is a sweep: leave out sweeps=")
        # With a cluster the command sends the points and exits, so no process would wait for the results.
        elif composition.points[0].values.get("cluster", {}).get("kind") == ClusterKind.slurm.value:
            wrong.append("a search waits for its answers, and cluster=slurm sends and leaves      fix: cluster=local")
        compositions.append(composition)
    if wrong:
        raise Refusal(list(dict.fromkeys(wrong)))
    return compositions


def _judged(composition: Composition, axes: tuple[str, ...], scene: Scene) -> Point | Refused:
    """The resolved point of one line, or the rules that it breaks."""
    (outcome,), _ = judged(replace(composition, axes=axes), scene)
    return outcome


def _key(point: Point | Refused) -> str:
    """The same key for lines that describe the same configuration."""
    return json.dumps(to_dict(point.config), sort_keys=True) if isinstance(point, Point) else str(point.overrides)


def _run(
    points: Sequence[Point | Refused], name: str, asked: Asked, scene: Scene, screen: Screen | None
) -> dict[str, Standing]:
    """The state of each point after the sweep, by label."""
    wishes = Wishes(retry=retry_states(asked.retry) if asked.retry else frozenset())
    request = sweep_command.SweepRequest(
        name, tuple(points), asked.command, wishes, asked.rank_by, study=asked.study, began=asked.began
    )
    paths = sweep_command.run_quietly(request, scene.hardware, screen)
    return {standing.label: standing for standing in sweep_record.standings(paths)}


def _trial(standing: Standing, metric: str, apart: Mapping[str, str]) -> Trial:
    folder = standing.attempt.root if standing.attempt else None
    if why := apart.get(standing.label):
        return Trial(standing.label, standing.state, None, f"it has no place beside the others: {why}", folder)
    result = standing.result
    if result is None:
        return Trial(standing.label, standing.state, None, standing.message, folder)
    value = ranking.METRICS[metric].read(result)
    message = standing.message if value is not None else f"it was measured, but there is no {metric} in its result"
    return Trial(standing.label, standing.state, value, message, folder)


def _refused(point: Refused) -> Trial:
    return Trial(point.label, RunState.refused, None, "; ".join(map(str, point.broken)))
