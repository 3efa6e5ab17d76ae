"""Runs a sweep on a cluster: sends its points and returns; any terminal can later read their state.

No process watches a cluster's sweep permanently, so every command that reads the state first updates the records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from orchestrator.config.cluster import ClusterError
from orchestrator.config.schema import Device, RunConfig, from_dict
from orchestrator.launch.cluster import SentPoints, SweepCluster
from orchestrator.launch.local_run import record
from orchestrator.launch.rank import ENTRY
from orchestrator.machine.hardware import Hardware
from orchestrator.records import sweep_record
from orchestrator.records.record_file import read_or_warn
from orchestrator.records.run_record import Attempt, AttemptPaths, new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, Standing, SweepPaths, tell
from orchestrator.report.summary import Row
from orchestrator.text.streams import complain
from orchestrator.tracking.feed import start_tracker
from orchestrator.wings.slurm import jobs, site
from orchestrator.wings.slurm.jobs import SlurmQueue
from orchestrator.wings.slurm.tools import JobPhase, JobSight
from orchestrator.wings.slurm.verdict import verdict_or_lost

OWNER = {"scheduler": "slurm"}


class SlurmCluster(SweepCluster):
    """SLURM as the cluster of a sweep: see SweepCluster. Across all terminals, one update of the records runs at a
    time."""

    _silent: ClassVar[ClusterError | None] = None  # why SLURM did not name the nodes for the last namer

    def __init__(self) -> None:
        self._queue = SlurmQueue()

    def namer(self, hardware: Hardware) -> Callable[[RunConfig], str]:
        """Where SLURM does not answer, a plan can be made all the same, and nothing is sent: see `preflight`."""
        ask, SlurmCluster._silent = _node_names(), None

        def name(config: RunConfig) -> str:
            if self._silent is None:
                try:
                    return ask(config)
                except ClusterError as error:
                    SlurmCluster._silent = error
                    why = "; ".join(str(error).splitlines())
                    complain(f"warning: the plan is made without the cluster, which does not answer: {why}")
            return site.UNKNOWN

        return name

    def preflight(self, configs: Sequence[RunConfig]) -> list[str]:
        """As of SweepCluster. ClusterError if SLURM did not name the nodes, whose names are part of what is sent."""
        if self._silent is not None:
            raise self._silent
        return site.problems(configs)

    def cost(self, configs: Sequence[RunConfig]) -> list[Row]:
        """An upper bound, from the time limits of the points."""
        if not configs:
            return []
        node_h = sum(config.resources.nodes * config.resources.time_limit_min for config in configs) / 60
        text = f"at most {node_h:.1f} node-hours"
        if configs[0].resources.device is Device.cuda:
            gpu_h = sum(config.resources.ranks * config.resources.time_limit_min for config in configs) / 60
            text += f" = {gpu_h:.1f} GPU-hours"
            price = configs[0].cluster.usd_per_gpu_hour
            text += f" = {gpu_h * price:.2f} USD" if price is not None else ""
        return [Row("cost", text)]

    def send(
        self, sweep: SweepPaths, planned: Sequence[Planned], entry: str = ENTRY, *, detached: bool = True
    ) -> SentPoints:
        """Sends the points that need a run, which never need this process. If SLURM refuses one, cancels all and
        raises."""
        queued = [point for point in planned if point.decision is RunState.queued]
        name = _node_names()
        configs = [from_dict(point.config) for point in queued]
        attempts = [
            new_attempt(sweep.output, point.config, point.label, name(config), owner=OWNER)
            for point, config in zip(queued, configs, strict=True)
        ]
        try:
            ids = jobs.submit(
                [(attempt.paths, config) for attempt, config in zip(attempts, configs, strict=True)],
                sweep.root / "slurm",
                name=f"zlab-{sweep.name.split('_', 2)[-1][:20]}",
                entry=entry,
            )
        except BaseException as error:
            for attempt in attempts:
                attempt.move(RunState.error, rank=0, message=f"could not be sent: {error}")
            raise
        for point, attempt, job in zip(queued, attempts, ids, strict=True):
            tell(sweep, "started", label=point.label, attempt=str(attempt.paths.root), slots=[], job=job)
        return SentPoints(jobs=ids)

    def look(self, sweep: SweepPaths) -> list[Standing]:
        """The state of every point after one query of the scheduler. If it does not answer, no state changes."""
        with sweep_record.only_controller(sweep, wait=True):
            moving = [point for point in sweep_record.standings(sweep) if point.job and not point.state.final]
            sights = self._queue.look([point.job for point in moving]) if moving else {}
            ended = [point.attempt for point in moving if point.attempt is not None and _move(point, sights[point.job])]
            if ended:
                _track(sweep, ended)
        return [_with_reason(point, sights.get(point.job)) for point in sweep_record.standings(sweep)]

    def runs(self, sweep: SweepPaths) -> bool:
        return not all(point.state.final for point in self.look(sweep))

    def cancel(self, sweep: SweepPaths, labels: Sequence[str] | None = None) -> None:
        moving = [point for point in sweep_record.standings(sweep) if point.job and not point.state.final]
        jobs.cancel([point.job for point in moving if labels is None or point.label in labels])


def _node_names() -> Callable[[RunConfig], str]:
    """A function that names the nodes of a point. It asks SLURM once for each kind of node."""
    known: dict[tuple[object, ...], str] = {}

    def name(config: RunConfig) -> str:
        key = (config.cluster.partition, config.cluster.constraint, config.resources.device)
        if key not in known:
            known[key] = site.hardware_name(config)
        return known[key]

    return name


def _move(point: Standing, sight: JobSight) -> bool:
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


def _track(sweep: SweepPaths, ended: Sequence[AttemptPaths]) -> None:
    """Brings MLflow up to date with the records of the sweep."""
    stored = read_or_warn(ended[0].config)
    if stored is None:
        return
    start_tracker(from_dict(stored), sweep.output, sweep).close()


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
