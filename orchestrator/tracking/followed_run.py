"""One attempt and its run in MLflow."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.schema import from_dict
from orchestrator.machine import provenance
from orchestrator.machine.processes import started
from orchestrator.records.record_file import EventTail, read_or_warn, require_json
from orchestrator.records.record_shapes import RESULT, STATE
from orchestrator.records.run_record import Attempt, AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.tracking import names
from orchestrator.tracking.store import MlflowStore
from orchestrator.tracking.sweep_names import experiment_of

# A value costs a processor 0.1 to 0.3 ms in MLflow's SQL store (benchmarks/logging_cost.py). So while ranks are being
# measured, steps that follow each other faster than this wait for the end of their run.
LIVE_GAP_MS = 200

Point = tuple[str, float, int, int]  # name, value, step, time in ms


@dataclass(frozen=True)
class RunNames:
    """What a run is called. sweep: its name, if there is one. varied: the settings that vary in it. kept: the date of
    an answer that an earlier command had. colour: of its bars and curves; empty for one that MLflow takes."""

    experiment: str
    label: str
    point: str
    sweep: str = ""
    varied: Mapping[str, str] = field(default_factory=dict)
    kept: str = ""
    colour: str = ""


class FollowedRun:
    """One attempt and its run in MLflow. `catch_up` may be called at any time and any number of times. Values that were
    already written are written again with the same steps and times, which has no effect in MLflow."""

    def __init__(self, store: MlflowStore, run: str, paths: AttemptPaths) -> None:
        self._store, self.run, self._paths = store, run, paths
        self._tail = EventTail(paths.metrics)
        self._waiting: list[Point] = []
        self._later: list[Point] = []  # for the end of the run
        self._live_ms: int | None = None  # time of the last step that was not left for the end
        self._last_steps: dict[str, int] = {}  # of each history

    def catch_up(self) -> None:
        """Writes what the ranks recorded since the last call, of fast steps one each LIVE_GAP_MS. A write that fails is
        repeated in the next call."""
        for event in self._tail.read_new():
            when = int(1000 * event.get("time", 0))
            points = self._later if self._is_fast(event["event"], when) else self._waiting
            for name, value in names.step_metrics(event).items():
                # A job that was requeued makes some steps twice, with equal losses; histories have each step once.
                if (step := event.get("step", 0)) > self._last_steps.get(name, -1):
                    self._last_steps[name] = step
                    points.append((name, value, step, when))
        if self._waiting:
            self._store.log_metrics(self.run, self._waiting)
            self._waiting = []

    def _is_fast(self, event: str, when: int) -> bool:
        """Whether this is a step that came so soon after the last one that was not, that it is left for the end."""
        if event != "step":
            return False
        is_fast = self._live_ms is not None and 0 <= when - self._live_ms < LIVE_GAP_MS
        self._live_ms = self._live_ms if is_fast else when
        return is_fast

    def finish(self) -> None:
        """Writes the steps that were left for the end, the summary, the artifacts and the final status, from the
        attempt's state. The status is written last, so that a run with one is complete."""
        self.catch_up()
        self._store.log_metrics(self.run, self._later)
        self._later = []
        state = read_or_warn(self._paths.state, STATE) or {}
        outcome = _outcome(state)
        result = read_or_warn(self._paths.result, RESULT) if RunState(outcome).measured else None
        ended = int(1000 * state.get("time", 0))  # of the record, so that a second writing adds nothing
        if result is not None:
            metrics = names.summary_metrics(result)
            self._store.log_metrics(self.run, [(key, value, 0, ended) for key, value in metrics.items()])
        self._store.client.set_tag(self.run, names.OUTCOME, outcome)
        logs = {self._paths.rank_log(0), self._paths.rank_log(int(state.get("rank") or 0))}
        kept = (self._paths.config, self._paths.result, self._paths.state, self._paths.provenance, self._paths.diff)
        for path in (*kept, *sorted(logs)):
            if path.exists():
                self._store.client.log_artifact(self.run, str(path))
        self._store.client.set_terminated(self.run, status=names.STATUS[outcome], end_time=ended or None)


def _outcome(state: Mapping[str, Any]) -> str:
    """The outcome of an ended attempt. A state that is not final means that the command died, and its ranks with it."""
    return str(state["state"]) if state.get("state") in names.STATUS else RunState.lost.value


def is_complete(run: Any, paths: AttemptPaths) -> bool:
    """Whether the run has the end that the attempt's records have, and everything that is written before it."""
    outcome = _outcome(read_or_warn(paths.state, STATE) or {})
    return bool(run.info.status == names.STATUS[outcome] and run.data.tags.get(names.OUTCOME) == outcome)


def open_run(store: MlflowStore, paths: AttemptPaths, named: RunNames, tags: Mapping[str, str]) -> FollowedRun:
    """Opens the run of the attempt: the one that the store has, else a new one with these tags."""
    attempt = {names.KIND: "point", names.POINT: named.point, names.ATTEMPT: str(paths.root)}
    attempt |= {names.SWEEP: named.sweep} if named.sweep else {}
    run = store.run_of(named.experiment, attempt, searched_by=names.POINT)
    if run is None:
        more = {key: value for key, value in ((names.KEPT, named.kept), (names.COLOUR, named.colour)) if value}
        label = f"{named.label} (reused)" if named.kept else named.label
        run = store.create_run(named.experiment, label, {**tags, **attempt, **more})
    store.log_params(run, {**named.varied, **names.params(read_or_warn(paths.config) or {})})
    return FollowedRun(store, run, paths)


def open_single(store: MlflowStore, paths: AttemptPaths, tags: Mapping[str, str]) -> FollowedRun:
    """Opens the run of an attempt in no sweep. BadRecord if its records cannot be read."""
    attempt, config = Attempt.reopen(paths), from_dict(require_json(paths.config))
    named = RunNames(experiment_of(config, None), attempt.label, attempt.point)
    return open_run(store, paths, named, tags)


def command_tags(parent: int) -> dict[str, str]:
    """The tags of a run: the command's process `parent`, the user, and the version of the code."""
    tags = {
        names.HOST: socket.gethostname(),
        names.PID: str(parent),
        names.STARTED: str(started(parent)),
        "mlflow.source.name": "run.py",
        "mlflow.user": _user(),
    }
    if (code := provenance.code()).commit:
        tags["mlflow.source.git.commit"] = code.commit
        tags["zlab.git_dirty"] = str(code.dirty).lower()
    return tags


def _user() -> str:
    """The user's name, or the number if this machine has no name for it, as in many containers."""
    with contextlib.suppress(KeyError, OSError):  # KeyError before Python 3.13
        return getpass.getuser()
    return str(os.getuid())
