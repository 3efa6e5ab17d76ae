"""Builds an output folder with ended sweeps without running anything; tests read and damage its files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from points import make_config, make_point
from stub_worker import make_result, step_event

from orchestrator.config.schema import to_dict
from orchestrator.planning import decision
from orchestrator.planning.point import Point, Wishes
from orchestrator.records import sweep_record
from orchestrator.records.record_file import append_event, write_json_atomic
from orchestrator.records.run_record import Attempt, AttemptPaths, new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, SweepPaths

HARDWARE = "cpu"


class Scene:
    """An output folder with two ended sweeps: one of three measured points and a failed one, one of a single point."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.points = tuple(_point(output, stage) for stage in range(4))
        self.other = self._sweep("other", self.points[:1])
        time.sleep(0.01)  # `last` is the sweep whose record was written last
        self.sweep = self._sweep("torn", self.points)
        self.first = AttemptPaths(Path(self.plan()[0].attempt))
        self.failed = self.attempt(self.points[3])
        self._copy = output.with_name("copy")
        shutil.copytree(output, self._copy, copy_function=shutil.copy2)

    def attempt(self, point: Point) -> AttemptPaths:
        (found,) = (
            one for one in self.output.glob("points/*/attempts/01") if f'"label": "{point.label}"' in _text(one)
        )
        return AttemptPaths(found)

    def restore(self) -> None:
        shutil.rmtree(self.output)
        shutil.copytree(self._copy, self.output, copy_function=shutil.copy2)

    def plan(self, wishes: Wishes | None = None) -> list[Planned]:
        """The decisions for the same command line if it is typed again."""
        return decision.decide(self.points, self.output, lambda config: HARDWARE, wishes or Wishes(), {})

    def _sweep(self, name: str, points: tuple[Point, ...]) -> SweepPaths:
        return ended_sweep(self.output, name, points)


def _text(attempt: Path) -> str:
    return (attempt / "state.json").read_text()


def _point(output: Path, stage: int) -> Point:
    point = make_point(make_config(output, stage=stage))
    return replace(point, label=f"stage{stage}")


def ended_sweep(output: Path, name: str, points: Sequence[Point]) -> SweepPaths:
    """Writes the records of a sweep whose points have ended as `ended` says."""
    planned = decision.decide(points, output, lambda config: HARDWARE, Wishes(), {})
    facts = {"command": ["zero=stage1"], "folder": str(output), "rank_by": "", "on_cluster": False}
    sweep = sweep_record.open_sweep(output, name, planned, facts)
    for one, point in zip(planned, points, strict=True):
        if one.decision is RunState.queued:
            attempt = ended(output, point)
            where = {"label": one.label, "attempt": str(attempt.paths.root), "slots": ["0"]}
            sweep_record.tell(sweep, "started", **where)
            sweep_record.tell(sweep, "ended", **where)
    sweep_record.tell(sweep, "end")
    sweep_record.ask(sweep, "detach")
    write_json_atomic(sweep.controller, {"pid": 2**22 + 1, "started": "gone"})
    for file in (sweep.report, sweep.results, sweep.page, sweep.log):
        file.write_text("text\n")
    return sweep


def ended(output: Path, point: Point) -> Attempt:
    """Writes the records of an attempt that was measured; for stage 3, of one that failed."""
    attempt = new_attempt(output, to_dict(point.config), point.label, HARDWARE)
    paths = attempt.paths
    attempt.move(RunState.starting)
    attempt.move(RunState.running)
    for step in range(1, 4):
        append_event(paths.metrics, step_event(step, 2))
    for rank in range(2):
        record = {"rank": rank, "pid": 2**22 + 1, "started": "gone", "state": "ok", "time": 1.0}
        write_json_atomic(paths.rank_record(rank), record)
        paths.rank_log(rank).write_text("a line\n")
    write_json_atomic(paths.exits, {str(rank): {"code": 0, "time": 1.0} for rank in range(2)})
    if point.config.zero.stage == 3:
        attempt.move(RunState.error, rank=1, message="why")
    else:
        write_json_atomic(paths.result, make_result(point.config, 9000.0 + point.config.zero.stage))
        attempt.move(RunState.ok)
    return attempt


FILES: dict[str, Callable[[Scene], Path]] = {
    "state.json": lambda scene: scene.first.state,
    "state.json of a failure": lambda scene: scene.failed.state,
    "result.json": lambda scene: scene.first.result,
    "metrics.jsonl": lambda scene: scene.first.metrics,
    "rank0.json": lambda scene: scene.failed.rank_record(0),
    "rank1.log": lambda scene: scene.failed.rank_log(1),
    "exits.json": lambda scene: scene.failed.exits,
    "config.json": lambda scene: scene.first.config,
    "provenance.json": lambda scene: scene.first.provenance,
    "config.json of the point": lambda scene: scene.first.root.parents[1] / "config.json",
    "identity.json": lambda scene: scene.first.root.parents[1] / "identity.json",
    "job.json": lambda scene: scene.first.job,
    "heartbeat.json": lambda scene: scene.first.heartbeat,
    "sweep.json": lambda scene: scene.sweep.sweep,
    "plan.json": lambda scene: scene.sweep.plan,
    "events.jsonl": lambda scene: scene.sweep.events,
    "requests.jsonl": lambda scene: scene.sweep.requests,
    "controller.json": lambda scene: scene.sweep.controller,
    "controller.log": lambda scene: scene.sweep.log,
    "report.md": lambda scene: scene.sweep.report,
    "results.csv": lambda scene: scene.sweep.results,
    "report.html": lambda scene: scene.sweep.page,
}
