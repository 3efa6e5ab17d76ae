"""Writes runs to MLflow from a separate process that follows their records.

`follow` writes a run or a sweep while it goes on, and what is missing of it once its command closes the process's
stdin or dies; `complete OUTPUT` writes what such processes of dead commands left; `sync OUTPUT` writes whatever a store
lacks of an output folder. Answers go to stdout, one JSON object in a line. Nothing here can end a run: failures become
warnings, and the records are kept.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.config.schema import from_dict
from orchestrator.records.record_file import EventTail, read_or_warn, require_json
from orchestrator.records.record_shapes import STATE, SWEEP_EVENTS, TURNS
from orchestrator.records.run_record import AttemptPaths, settle
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Standing, SweepPaths, is_on_cluster, standings
from orchestrator.tracking import left
from orchestrator.tracking.followed_run import FollowedRun, command_tags, open_single
from orchestrator.tracking.store import MlflowStore
from orchestrator.tracking.sweep_names import experiment_of
from orchestrator.tracking.sweep_runs import SweepRuns
from orchestrator.tracking.sync import complete_left, first_line, sync

# After each write the tracker pauses for REST times as long, but at most LONGEST_S: it takes at most 1 % of one core
# from the ranks that are being measured, as long as a write takes less than 0.3 s.
PERIOD_S, REST, LONGEST_S = 2.0, 100.0, 30.0
DEATH_S = 2.0  # until a killed command, whose pipe is closed, has ended


class Follower:
    """Writes what the store lacks of a sweep or of an attempt, at each tick what is new in its records. A failure
    becomes a warning, one for each attempt, and is tried again at the next tick."""

    def __init__(self, uri: str, output: Path, of: SweepPaths | AttemptPaths, parent: int) -> None:
        self._uri, self._output, self._parent = uri, output, parent
        self._sweep = of if isinstance(of, SweepPaths) else None
        self._root = of.root
        self._store: MlflowStore | None = None
        self._runs: SweepRuns | None = None
        self._events = EventTail(of.events, SWEEP_EVENTS) if isinstance(of, SweepPaths) else None
        # Attempts that have not ended, with their labels; and the runs that are open.
        self._attempts = {of: ""} if isinstance(of, AttemptPaths) else {}
        self._open: dict[AttemptPaths, FollowedRun] = {}
        self._kept: list[Standing] = []  # points whose runs are written one at a tick
        self._warned: set[object] = set()
        self._tags = command_tags(parent)

    def open(self) -> bool:
        """Opens the store, the experiment and the page of the sweep, unless they are open. Whether they are now."""
        return self._is_open or self._guarded("", self._prepare)

    @property
    def _is_open(self) -> bool:
        return self._store is not None and (self._sweep is None) == (self._runs is None)

    def _prepare(self) -> None:
        store = self._store or MlflowStore(self._uri, self._output)
        if self._sweep is None:
            store.experiment(experiment_of(from_dict(require_json(AttemptPaths(self._root).config)), None))
        else:
            runs = SweepRuns(store, self._sweep, self._tags)
            runs.prepare()
            self._kept = [standing for standing, _ in runs.missing()]
            self._runs = runs
        self._store = store

    def tick(self) -> float:
        """Writes new values. Returns the seconds for which to leave the processor to the ranks."""
        begun = time.monotonic()
        if self.open():
            self._find_started()
            for attempt in list(self._attempts):
                if not self._guarded(attempt, partial(self._follow, attempt)):
                    self._attempts[attempt] = self._attempts.pop(attempt)  # the next tick begins with another
                    break
            if self._kept and self._runs is not None:
                standing = self._kept.pop(0)
                self._guarded(standing.label, partial(self._runs.write, standing))
        return min(LONGEST_S, max(PERIOD_S, REST * (time.monotonic() - begun)))

    def _find_started(self) -> None:
        if self._events is None or self._sweep is None or is_on_cluster(self._sweep):
            return  # what a scheduler runs is written when it has ended
        for event in self._events.read_new():
            if event["event"] == "started":
                self._attempts[AttemptPaths(Path(event["attempt"]))] = event["label"]

    def _follow(self, attempt: AttemptPaths) -> None:
        """Writes what is new of an attempt whose ranks have been started; all of it if it has ended."""
        state = RunState((read_or_warn(attempt.state, STATE) or {}).get("state", RunState.queued))
        if state in (RunState.queued, RunState.pruned) or _is_part(attempt):
            return
        if attempt not in self._open:
            self._open[attempt] = self._opened(attempt)
        self._open[attempt].catch_up()
        if state.final:
            self._open[attempt].finish()
            del self._attempts[attempt], self._open[attempt]

    def _opened(self, attempt: AttemptPaths) -> FollowedRun:
        assert self._store is not None
        if self._runs is None:
            return open_single(self._store, attempt, self._tags)
        return self._runs.open(self._attempts[attempt], attempt)

    def finish(self) -> None:
        """Writes everything from the records, after the command has closed its end or has died."""
        done = self.open()
        if done:
            self._find_started()
            for attempt in list(self._attempts):
                self._await_end(attempt)
                done = self._guarded(attempt, partial(self._end, attempt)) and done
            if self._sweep is not None:
                done = self._guarded(self._root, self._finish_sweep) and done
        if done and not self._open:
            left.forget(self._output, self._root)
        else:
            _answer({"warning": "not everything was written; the next command or the verb sync writes it"})

    def _await_end(self, attempt: AttemptPaths) -> None:
        """Waits until a command that was killed has ended, so that its attempt can be settled."""
        deadline = time.monotonic() + DEATH_S
        while not settle(attempt).final and os.getppid() == self._parent and time.monotonic() < deadline:
            time.sleep(0.05)

    def _end(self, attempt: AttemptPaths) -> None:
        self._follow(attempt)
        if attempt in self._open:  # its owner may live on another machine: a later command, which knows more, mends it
            self._open[attempt].finish()
        _answer({"done": attempt.root.name})

    def _finish_sweep(self) -> None:
        assert self._runs is not None
        assert self._sweep is not None
        for standing, _ in self._runs.missing():
            self._runs.write(standing)
            _answer({"done": standing.label})
        self._runs.end_replaced()
        if all(standing.state.final for standing in standings(self._sweep)):
            self._runs.summarize()

    def _guarded(self, what: object, action: Callable[[], object]) -> bool:
        """Whether the action succeeded."""
        try:
            action()
        except Exception as error:  # a tracker must never end a run, whatever its store does
            if what not in self._warned:
                self._warned.add(what)
                _answer({"warning": first_line(error)})
            return False
        return True


def _is_part(attempt: AttemptPaths) -> bool:
    """Whether the attempt measures a single round: the last attempt has the result of all of them."""
    return bool((read_or_warn(attempt.turns, TURNS) or {}).get("short"))


def _answer(message: Mapping[str, Any]) -> None:
    # A command that has ended cannot read this, but the remaining writes must still be made.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def follow(uri: str, output: Path, of: SweepPaths | AttemptPaths) -> NoReturn:
    """Writes the records of a command until it closes the pipe or dies, then what is missing, and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C and reports how the run ended
    follower = Follower(uri, output, of, os.getppid())
    _answer({"ready": follower.open()})
    # The imports ran at full speed before the ranks measure. From here on this process has low priority.
    os.nice(10)
    complete_left(output)
    pause_s = 0.0
    while not select.select([sys.stdin], [], [], pause_s)[0]:
        pause_s = follower.tick()
    follower.finish()
    os._exit(0)  # everything is written; MLflow's exit hooks would delay the command


def main(argv: list[str]) -> int:
    """Runs the command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.tracking.process")
    actions = parser.add_subparsers(dest="action", required=True)
    follow_parser = actions.add_parser("follow", help="used by the command itself")
    follow_parser.add_argument("--uri", required=True)
    of = follow_parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--sweep", type=lambda root: SweepPaths(Path(root)), dest="of")
    of.add_argument("--attempt", type=lambda root: AttemptPaths(Path(root)), dest="of")
    complete_parser = actions.add_parser("complete", help="used by every command that finds something left")
    sync_parser = actions.add_parser("sync", help="used by the verbs sync and ui")
    sync_parser.add_argument("--uri", default="")
    sync_parser.add_argument("--sweep", action="append", default=[], type=Path)
    for one in (follow_parser, complete_parser, sync_parser):
        one.add_argument("output", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.action == "complete":
        os.nice(10)
        complete_left(arguments.output)
    elif arguments.action == "sync":
        for line in sync(arguments.output, arguments.uri, [SweepPaths(root) for root in arguments.sweep]):
            _answer(asdict(line))
    else:
        follow(arguments.uri, arguments.output, arguments.of)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
