"""Writes runs to MLflow from a separate process that follows their records.

`follow` reads JSON messages from stdin, one per line, and answers on stdout; `complete OUTPUT` completes the runs that
dead commands left, from their records; `sync OUTPUT` writes whatever a store lacks of an output folder.
Nothing here can end a run: failures become warnings, and the records are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.records.sweep_record import Standing, SweepPaths
from orchestrator.tracking import notes as tracking_notes
from orchestrator.tracking.followed_run import FollowedRun, command_tags, complete, open_run, reconcile
from orchestrator.tracking.store import MlflowStore
from orchestrator.tracking.sweep_runs import SweepRuns
from orchestrator.tracking.sync import sync

# After each write the tracker pauses for REST times as long, but at most LONGEST_S: it takes at most 1 % of one core
# from the ranks that are being measured, as long as a write takes less than 0.3 s.
PERIOD_S, REST, LONGEST_S = 2.0, 100.0, 30.0


class Follower:
    """Carries out messages in their order. What the store does not take is tried again at each tick, as long as the
    store does not answer at all. A failure becomes a warning, at most one per attempt."""

    def __init__(self, uri: str, output: Path, parent: int) -> None:
        self._uri, self._output = uri, output
        self._store: MlflowStore | None = None
        self._runs: dict[str, FollowedRun] = {}
        self._left: list[Mapping[str, Any]] = []  # messages that wait for the store
        self._sweep: SweepRuns | None = None
        self._kept: list[Standing] = []  # points whose runs are written one at a tick
        self._warned: set[str] = set()
        self._error: Exception | None = None  # the last one
        self._tags = command_tags(parent)

    def handle(self, message: Mapping[str, Any]) -> None:
        """Carries out one message, after those that wait. Never raises."""
        self._left.append(message)
        if len(self._left) == 1:
            self._carry_out()

    def _carry_out(self) -> None:
        """Carries out the messages that wait, until the store does not answer."""
        actions = {"open": self._open, "sweep": self._follow_sweep, "begin": self._begin, "end": self._end}
        actions["summary"] = self._summary
        while self._left:
            message = self._left[0]
            done = self._guarded(str(message.get("attempt", "")), partial(actions[message["do"]], message))
            if not done and self._is_away():
                self._left[0] = {**message, "again": True}
                return
            self._left.pop(0)
            _answer({"done": message["do"]})

    def tick(self) -> float:
        """Writes new values. Returns the seconds for which to leave the processor to the ranks."""
        begun = time.monotonic()
        self._carry_out()
        for attempt, run in self._runs.items() if not self._left else ():
            if not self._guarded(attempt, run.catch_up):
                break
        if self._kept and self._sweep is not None and not self._left:
            sweep, standing = self._sweep, self._kept.pop(0)
            self._guarded(standing.label, partial(sweep.write, standing))
        return min(LONGEST_S, max(PERIOD_S, REST * (time.monotonic() - begun)))

    def finish_all(self) -> None:
        """Finishes the open runs from their records, after the command has ended."""
        if self._left:
            self._carry_out()
        for attempt in list(self._runs):
            self.handle({"do": "end", "attempt": attempt})
        if self._left:
            _answer({"warning": f"{len(self._left)} writes are left; the next command or the verb sync makes them"})

    def _guarded(self, attempt: str, action: Any) -> bool:
        """Whether the action succeeded."""
        try:
            action()
        except Exception as error:  # a tracker must never end a run, whatever its store does
            self._error = error
            if attempt not in self._warned:
                self._warned.add(attempt)
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                _answer({"warning": first[:300]})
            return False
        return True

    def _is_away(self) -> bool:
        """Whether the store that refused a message answers nothing at all, and may take it later."""
        if self._store is None:
            return isinstance(self._error, OSError)  # what else it cannot be opened for stays so
        try:
            self._store.client.search_experiments(max_results=1)
        except Exception:
            return True
        return False

    def _opened(self, experiment: str) -> MlflowStore:
        self._store = self._store or MlflowStore(self._uri, self._output)
        self._store.experiment(experiment)
        return self._store

    def _open(self, message: Mapping[str, Any]) -> None:
        try:
            store = self._opened(message["experiment"])
        finally:
            _answer({"ready": self._store is not None})
            if not message.get("again"):
                # The imports ran at full speed before the ranks measure. From here on this process has low priority.
                os.nice(10)
        reconcile(store, message["experiment"])
        complete(self._output, {self._uri: store})

    def _follow_sweep(self, message: Mapping[str, Any]) -> None:
        sweep = SweepRuns(self._opened(message["experiment"]), SweepPaths(Path(message["sweep"])), self._tags)
        sweep.prepare()
        self._sweep, self._kept = sweep, [standing for standing, _ in sweep.missing()]

    def _begin(self, message: Mapping[str, Any]) -> None:
        store = self._opened(message["experiment"])
        if not tracking_notes.is_noted(self._output, message["attempt"]):
            # The command was killed while the store was opened, and the run was completed as one that it had left.
            message = {**message, "again": True}
        self._runs[message["attempt"]] = open_run(store, message, self._tags)

    def _end(self, message: Mapping[str, Any]) -> None:
        if (run := self._runs.get(message["attempt"])) is None:
            return
        run.finish()
        self._runs.pop(message["attempt"])

    def _summary(self, message: Mapping[str, Any]) -> None:
        sweep = SweepRuns(self._opened(message["experiment"]), SweepPaths(Path(message["sweep"])), self._tags)
        for standing, _ in sweep.missing():
            sweep.write(standing)
            _answer({"done": standing.label})
        self._kept = []
        sweep.summarize()


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
    complete_parser = actions.add_parser("complete", help="used by every command that finds something left")
    sync_parser = actions.add_parser("sync", help="used by the verbs sync and ui")
    sync_parser.add_argument("--uri", default="")
    sync_parser.add_argument("--sweep", action="append", default=[], type=Path)
    for one in (follow_parser, complete_parser, sync_parser):
        one.add_argument("output", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.action == "complete":
        os.nice(10)
        complete(arguments.output, {})
    elif arguments.action == "sync":
        for line in sync(arguments.output, arguments.uri, [SweepPaths(root) for root in arguments.sweep]):
            _answer(line.to_dict())
    else:
        follow(arguments.uri, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
