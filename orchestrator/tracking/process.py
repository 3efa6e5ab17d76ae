"""Writes runs to MLflow from a separate process that follows their records. The only module that imports mlflow.

`follow` reads JSON messages from stdin, one per line, and answers on stdout; `complete OUTPUT` completes the runs that
dead commands left, from their records.
Nothing here can end a run: failures become warnings, and the records are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.config.schema import from_dict
from orchestrator.machine import provenance
from orchestrator.machine.locks import locked
from orchestrator.machine.processes import is_alive, started
from orchestrator.records.record_file import EventTail, read_or_warn
from orchestrator.records.record_shapes import RESULT, STATE
from orchestrator.records.run_record import AttemptPaths, artifacts_path, settle
from orchestrator.records.run_state import RunState
from orchestrator.tracking import chart_page, names
from orchestrator.tracking import notes as tracking_notes
from orchestrator.tracking.feed import store_uri

# Writing a metric takes about 1 ms. After each write the tracker pauses for REST times as long, because the ranks are
# being measured: tracking must not slow a run of many short steps.
PERIOD_S, REST, LONGEST_S = 2.0, 30.0, 30.0
NOTE_LIMIT = 5000
BATCH = 500


class MlflowStore:
    """An MLflow client for our experiments. Creates each one once, with its chart page, and closes its dead runs."""

    def __init__(self, uri: str, output: Path) -> None:
        import mlflow  # imported here: it takes seconds, and `ui` does not need it
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._param, self._tag = Metric, Param, RunTag
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        self._local = uri == names.local_uri(output)
        self.output = output
        self._experiments: dict[str, str] = {}

    def experiment(self, name: str) -> str:
        """The id of the experiment, which is created if it does not exist."""
        if name not in self._experiments:
            # One process at a time creates the store: two would break each other's migration of a new SQLite file.
            with locked(self.output / ".mlflow.lock"):
                self._experiments[name] = self._open(name)
            reconcile(self, self._experiments[name])
        return self._experiments[name]

    def _open(self, name: str) -> str:
        known = self.client.get_experiment_by_name(name)
        if known is None:
            where = artifacts_path(self.output).as_uri() if self._local else None
            experiment = str(self.client.create_experiment(name, artifact_location=where))
        else:
            experiment = str(known.experiment_id)
        if known is None or known.tags.get(chart_page.TAG) != chart_page.view():
            self.client.set_experiment_tag(experiment, chart_page.TAG, chart_page.view())
        return experiment

    def run_of(self, experiment: str, tags: Mapping[str, str], *, searched_by: str) -> str | None:
        """The id of the newest run with these tags. The query uses one of them, whose value needs no quoting."""
        query = f"tags.`{searched_by}` = '{tags[searched_by]}'"
        runs = self.client.search_runs([self.experiment(experiment)], query)
        return next((str(run.info.run_id) for run in runs if tags.items() <= run.data.tags.items()), None)

    def create_run(self, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        run = self.client.create_run(self.experiment(experiment), run_name=name, tags=dict(tags))
        return str(run.info.run_id)

    def log_metrics(self, run: str, points: list[tuple[str, float, int, int]]) -> None:
        """Writes points of (name, value, step, time in ms)."""
        for begin in range(0, len(points), BATCH):
            batch = [self._metric(key, value, when, step) for key, value, step, when in points[begin : begin + BATCH]]
            self.client.log_batch(run, metrics=batch)

    def log_params(self, run: str, values: Mapping[str, str]) -> None:
        every = [self._param(key, value) for key, value in values.items()]
        for begin in range(0, len(every), 100):
            self.client.log_batch(run, params=every[begin : begin + 100])


def reconcile(store: MlflowStore, experiment: str) -> list[str]:
    """Ends the runs in state RUNNING whose command on this host has ended. Returns their ids. Each run gets the state
    in its records; without records it is lost."""
    ended = []
    for run in store.client.search_runs([experiment], "attributes.status = 'RUNNING'"):
        tags = run.data.tags
        if tags.get(names.HOST) != socket.gethostname() or names.PID not in tags:
            continue
        if is_alive(int(tags[names.PID]), tags.get(names.STARTED)):
            continue
        store.client.set_tag(run.info.run_id, names.RECONCILED, "its command was gone")
        paths = AttemptPaths(Path(tags.get(names.ATTEMPT, "nowhere")))
        if paths.state.exists():
            settle(paths)
        FollowedRun(store, run.info.run_id, paths).finish()
        ended.append(run.info.run_id)
    return ended


def open_run(store: MlflowStore, message: Mapping[str, Any], tags: Mapping[str, str]) -> FollowedRun:
    """Opens the run of the attempt in a message: a new run, or with `again` the one that an earlier tracker created."""
    attempt = {names.KIND: "point", names.POINT: message["point"], names.ATTEMPT: message["attempt"]}
    paths = AttemptPaths(Path(message["attempt"]))
    experiment = message["experiment"]
    run = store.run_of(experiment, attempt, searched_by=names.POINT) if message.get("again") else None
    if run is None:
        sweep = {names.SWEEP: message["sweep"]} if message.get("sweep") else {}
        run = store.create_run(experiment, message["label"], {**tags, **attempt, **sweep})
    store.log_params(run, names.params(read_or_warn(paths.config) or {}))
    return FollowedRun(store, run, paths)


class FollowedRun:
    """One attempt and its run in MLflow. `catch_up` may be called at any time and any number of times. Values that were
    already written are written again with the same steps and times, which has no effect in MLflow."""

    def __init__(self, store: MlflowStore, run: str, paths: AttemptPaths) -> None:
        self._store, self.run, self._paths = store, run, paths
        self._tail = EventTail(paths.metrics)
        self._waiting: list[tuple[str, float, int, int]] = []
        self._last_steps: dict[str, int] = {}  # of each history

    def catch_up(self) -> None:
        """Writes what the ranks recorded since the last call. A write that fails is repeated in the next call."""
        for event in self._tail.read_new():
            when = int(1000 * event.get("time", time.time()))
            metrics = names.step_metrics(event)
            for name, value in metrics.items():
                # A job that was requeued makes some steps twice, with equal losses; histories have each step once.
                if event["step"] > self._last_steps.get(name, -1):
                    self._last_steps[name] = event["step"]
                    self._waiting.append((name, value, event["step"], when))
        if self._waiting:
            self._store.log_metrics(self.run, self._waiting)
            self._waiting = []

    def finish(self) -> None:
        """Writes the summary, the artifacts and the final status, from the attempt's state."""
        self.catch_up()
        state = read_or_warn(self._paths.state, STATE) or {}
        # A state that is not final means that the command died, and its ranks with it.
        outcome = state["state"] if state.get("state") in names.STATUS else RunState.lost.value
        result = read_or_warn(self._paths.result, RESULT) if RunState(outcome).measured else None
        if result is not None:
            when = int(1000 * time.time())
            metrics = names.summary_metrics(result)
            self._store.log_metrics(self.run, [(key, value, 0, when) for key, value in metrics.items()])
        self._store.client.set_tag(self.run, names.OUTCOME, outcome)
        logs = {self._paths.rank_log(0), self._paths.rank_log(int(state.get("rank") or 0))}
        kept = (self._paths.config, self._paths.result, self._paths.state, self._paths.provenance, self._paths.diff)
        for path in (*kept, *sorted(logs)):
            if path.exists():
                self._store.client.log_artifact(self.run, str(path))
        self._store.client.set_terminated(self.run, status=names.STATUS[outcome])
        if RunState(state.get("state", RunState.lost)).final:  # else the next command, which knows more, completes it
            tracking_notes.forget(self._store.output, str(self._paths.root))


def complete(output: Path, stores: dict[str, MlflowStore]) -> None:
    """Completes the runs that dead commands left, from their records. `stores`: the stores that are open, by URI.
    Failures are printed to stderr, and a later command tries again."""
    with locked(output / ".tracking.lock", wait=False) as alone:
        # Without the lock, another command's process is completing them.
        for message in tracking_notes.left_behind(output) if alone else ():
            try:
                _complete_one(output, message, stores)
            except Exception as error:  # noqa: PERF203  one that cannot be completed keeps no other from it
                print(f"{message['attempt']}: {type(error).__name__}: {error}", file=sys.stderr)


def _complete_one(output: Path, message: Mapping[str, Any], stores: dict[str, MlflowStore]) -> None:
    paths = AttemptPaths(Path(message["attempt"]))
    config = read_or_warn(paths.config)
    if config is None or not paths.state.exists():
        tracking_notes.forget(output, message["attempt"])  # the attempt was deleted
        return
    if not settle(paths).final:
        return  # a scheduler has it; the command that next checks the job records its end
    tracking_notes.count_try(output, message)
    uri = store_uri(from_dict(config), output, os.environ)
    if uri not in stores:
        stores[uri] = MlflowStore(uri, output)
    command = message["command"]
    tags = {names.HOST: command["host"], names.PID: str(command["pid"]), names.STARTED: str(command["started"])}
    open_run(stores[uri], {**message, "again": True}, tags).finish()


class Follower:
    """Carries out messages. A failure becomes a warning, at most one per attempt."""

    def __init__(self, uri: str, output: Path, parent: int) -> None:
        self._uri, self._output = uri, output
        self._store: MlflowStore | None = None
        self._runs: dict[str, FollowedRun] = {}
        self._warned: set[str] = set()
        self._tags = _command_tags(parent)

    def handle(self, message: Mapping[str, Any]) -> None:
        """Carries out one message. Never raises."""
        action = {"open": self._open, "begin": self._begin, "end": self._end, "summary": self._summary}
        self._guarded(str(message.get("attempt", "")), lambda: action[message["do"]](message))

    def tick(self) -> float:
        """Writes new values. Returns the seconds for which to leave the processor to the ranks."""
        begun = time.monotonic()
        for attempt, run in self._runs.items():
            self._guarded(attempt, run.catch_up)
        return min(LONGEST_S, max(PERIOD_S, REST * (time.monotonic() - begun)))

    def finish_all(self) -> None:
        """Finishes the open runs from their records, after the command has ended."""
        for attempt in list(self._runs):
            self.handle({"do": "end", "attempt": attempt})

    def _guarded(self, attempt: str, action: Any) -> None:
        try:
            action()
        except Exception as error:  # a tracker must never end a run, whatever its store does
            if attempt not in self._warned:
                self._warned.add(attempt)
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                _answer({"warning": first[:300]})

    def _open(self, message: Mapping[str, Any]) -> None:
        try:
            self._store = self._store or MlflowStore(self._uri, self._output)
            self._store.experiment(message["experiment"])
        finally:
            _answer({"ready": self._store is not None})
            # The imports ran at full speed before the ranks measure. From here on this process has low priority.
            os.nice(10)
        complete(self._output, {self._uri: self._store})

    def _begin(self, message: Mapping[str, Any]) -> None:
        self._store = self._store or MlflowStore(self._uri, self._output)
        if not tracking_notes.is_noted(self._output, message["attempt"]):
            # The command was killed while the store was opened, and the run was completed as one that it had left.
            message = {**message, "again": True}
        self._runs[message["attempt"]] = open_run(self._store, message, self._tags)

    def _end(self, message: Mapping[str, Any]) -> None:
        run = self._runs.pop(message["attempt"], None)
        if run is not None:
            run.finish()

    def _summary(self, message: Mapping[str, Any]) -> None:
        assert self._store is not None
        experiment, run = message["experiment"], ""
        tags = {**self._tags, names.KIND: "summary", names.SWEEP: message["sweep"]}
        if message.get("again"):  # an earlier tracker may have been killed at any point below
            run = self._store.run_of(experiment, tags, searched_by=names.PID) or ""
        if not run:
            tags["mlflow.note.content"] = message["table"][:NOTE_LIMIT]
            run = self._store.create_run(experiment, message["sweep"], tags)
        for path in message["files"]:
            self._store.client.log_artifact(run, path)
        self._store.client.set_terminated(run, status="FINISHED")


def _command_tags(parent: int) -> dict[str, str]:
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
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return str(os.getuid())


def _answer(message: Mapping[str, Any]) -> None:
    # A command that has ended cannot read this, but the remaining writes must still be made.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def follow(uri: str, output: Path) -> NoReturn:
    """Serves the command's messages on stdin until it closes the pipe or dies, then ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C and reports how the run ended
    follower = Follower(uri, output, os.getppid())
    unended = b""
    pause_s = PERIOD_S
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], pause_s)
        if not readable:
            pause_s = follower.tick()
            continue
        chunk = os.read(sys.stdin.fileno(), 65536)
        if not chunk:
            break
        *lines, unended = (unended + chunk).split(b"\n")
        for line in lines:
            follower.handle(json.loads(line))
    follower.finish_all()
    os._exit(0)  # everything is written; MLflow's exit hooks would delay the command


def main(argv: list[str]) -> int:
    """Runs the command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.tracking.process")
    actions = parser.add_subparsers(dest="action", required=True)
    follow_parser = actions.add_parser("follow", help="used by the command itself")
    follow_parser.add_argument("--uri", required=True)
    follow_parser.add_argument("output", type=Path)
    complete_parser = actions.add_parser("complete", help="used by every command that finds something left")
    complete_parser.add_argument("output", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.action == "complete":
        os.nice(10)
        complete(arguments.output, {})
        return 0
    follow(arguments.uri, arguments.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
