"""Runs a sweep on a cluster: sends its points and returns; any terminal can later read their state.

No process watches a cluster's sweep permanently, so every command that reads the state first updates the records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.launch.local_run import record
from orchestrator.launch.rank import ENTRY
from orchestrator.records import sweep_record
from orchestrator.records.record_file import read_or_warn
from orchestrator.records.record_shapes import JOB
from orchestrator.records.run_record import Attempt, AttemptPaths, new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, Standing, SweepPaths, tell
from orchestrator.tracking.feed import start_tracker
from orchestrator.wings.slurm import jobs as slurm
from orchestrator.wings.slurm import site as slurm_site
from orchestrator.wings.slurm.jobs import SlurmQueue
from orchestrator.wings.slurm.tools import JobPhase, JobSight
from orchestrator.wings.slurm.verdict import verdict_or_lost

OWNER = {"scheduler": "slurm"}


def names() -> Callable[[RunConfig], str]:
    """A function that names the hardware of a point. It asks SLURM once for each kind of node."""
    known: dict[tuple[object, ...], str] = {}

    def name(config: RunConfig) -> str:
        key = (config.cluster.partition, config.cluster.constraint, config.resources.device)
        if key not in known:
            known[key] = slurm_site.hardware_name(config)
        return known[key]

    return name


def send(sweep: SweepPaths, planned: Sequence[Planned], entry: str = ENTRY) -> list[str]:
    """Sends the points that need a run. Returns their job ids. If SLURM refuses one, cancels all and raises."""
    name = names()
    queued = [point for point in planned if point.decision is RunState.queued]
    attempts = [
        new_attempt(sweep.output, point.config, point.label, name(from_dict(point.config)), owner=OWNER)
        for point in queued
    ]
    configs = [from_dict(point.config) for point in queued]
    try:
        jobs = slurm.submit(
            [(attempt.paths, config) for attempt, config in zip(attempts, configs, strict=True)],
            sweep.root / "slurm",
            name=f"zlab-{sweep.name.split('_', 2)[-1][:20]}",
            entry=entry,
        )
    except BaseException as error:
        for attempt in attempts:
            attempt.move(RunState.error, rank=0, message=f"could not be sent: {error}")
        raise
    for point, attempt, job in zip(queued, attempts, jobs, strict=True):
        tell(sweep, "started", label=point.label, attempt=str(attempt.paths.root), slots=[], job=job)
    return jobs


class ClusterView:
    """Updates a sweep's records repeatedly; across all terminals, one update runs at a time."""

    def __init__(self, sweep: SweepPaths) -> None:
        self._sweep = sweep
        self._scheduler = SlurmQueue()

    def look(self) -> list[Standing]:
        """The state of every point after one query of the scheduler. If it does not answer, no state changes."""
        with sweep_record.only_controller(self._sweep, wait=True):
            moving = [point for point in sweep_record.standings(self._sweep) if point.job and not point.state.final]
            sights = self._scheduler.look([point.job for point in moving]) if moving else {}
            ended = [
                point.attempt for point in moving if point.attempt is not None and self._move(point, sights[point.job])
            ]
            if ended:
                self._track(ended)
        return [_with_reason(point, sights.get(point.job)) for point in sweep_record.standings(self._sweep)]

    def _move(self, point: Standing, sight: JobSight) -> bool:
        """Updates the state of the attempt. Returns whether it has ended."""
        assert point.attempt is not None
        world = int(point.planned.config["resources"]["ranks"])
        verdict = verdict_or_lost(point.attempt, world, sight)
        attempt = Attempt.reopen(point.attempt)
        if verdict is None:
            _move_along(attempt, sight)
            return False
        if attempt.state is RunState.queued and verdict.state is not RunState.cancelled:
            attempt.move(RunState.starting)
        record(attempt, verdict)
        return True

    def _track(self, ended: Sequence[AttemptPaths]) -> None:
        """Adds the ended runs to MLflow, from their records; after the last one also the summary."""
        stored = read_or_warn(ended[0].config)
        if stored is None:
            return
        config = from_dict(stored)
        tracker = start_tracker(config, self._sweep.output, self._sweep)
        tracker.wait_for_store()
        for paths in ended:
            attempt = Attempt.reopen(paths)
            tracker.begin(attempt, config, self._sweep)
            tracker.end(attempt)
        if all(standing.state.final for standing in sweep_record.standings(self._sweep)):
            tracker.summary(self._sweep)
        tracker.close()


def _with_reason(point: Standing, sight: JobSight | None) -> Standing:
    """Adds to a waiting point its reason and the start time that the scheduler expects."""
    if sight is None or sight.state is not JobPhase.pending:
        return point
    start = f", starts about {time.strftime('%H:%M', time.localtime(sight.est_start))}" if sight.est_start else ""
    return replace(point, message=f"{point.message or sight.reason}{start}")


def _move_along(attempt: Attempt, sight: JobSight) -> None:
    """Updates a job that waits or runs; it may have been requeued since the last look."""
    if sight.state is JobPhase.pending and attempt.state is not RunState.queued:
        attempt.move(RunState.queued, message=f"back in the queue: {sight.reason}" if sight.reason else "")
    elif sight.state is JobPhase.running and attempt.state is RunState.queued:
        attempt.move(RunState.starting, message="")
    elif sight.state is JobPhase.running and attempt.state is RunState.starting and attempt.paths.metrics.exists():
        attempt.move(RunState.running)


def cancel(sweep: SweepPaths, labels: Sequence[str]) -> None:
    """Asks SLURM to end the jobs of these points."""
    standings = sweep_record.standings(sweep)
    slurm.cancel([point.job for point in standings if point.job and point.label in labels and not point.state.final])


def log_of(attempt: AttemptPaths) -> Path | None:
    """The log of SLURM and the setup lines for the job, if it exists: the only log if no rank has written one."""
    log = (read_or_warn(attempt.job, JOB) or {}).get("log")
    return Path(log) if log and Path(log).is_file() else None
