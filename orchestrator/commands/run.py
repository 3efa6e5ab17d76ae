"""Runs one point in the foreground: starts it, shows it step by step, records it and reports its result."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from orchestrator import wings
from orchestrator.commands import admission
from orchestrator.commands.admission import Admission
from orchestrator.commands.next_run import next_after_run
from orchestrator.config.schema import TrackingKind, to_dict
from orchestrator.exit_codes import INTERRUPTED
from orchestrator.launch import verdict as watch
from orchestrator.launch.local_run import PointRun, record, waited_slots
from orchestrator.launch.rank import ENTRY
from orchestrator.launch.verdict import Verdict
from orchestrator.machine import hardware
from orchestrator.machine.processes import signals_interrupt
from orchestrator.planning.point import Point
from orchestrator.records.record_file import read_or_warn
from orchestrator.records.record_shapes import RESULT
from orchestrator.records.run_record import Attempt, new_attempt, result_of
from orchestrator.records.run_state import RunState
from orchestrator.report import comparison, summary, trained
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row
from orchestrator.text.paths import dashboard, shown
from orchestrator.tracking.feed import Tracker, check_store, complete_left_behind, start_tracker

LOOK_S = 0.2


def run_point(
    point: Point,
    *,
    entry: str = ENTRY,
    screen: Screen | None = None,
    as_json: bool = False,
    admission: Admission | None = None,
) -> int:
    """Runs one point. Call it from the main thread. `as_json`: prints its record to stdout and all else to stderr.
    `admission`: None starts it without a prediction.

    Starts a new attempt even if the point has a result, because a user who types a single run wants to see it run. A
    sweep keeps results.
    Returns the exit code of `comparison.exit_code_of`, or 130 if it was stopped. In every case none of its processes is
    left. Refusal, before anything starts: its tracking store is a database of another version.
    """
    screen = screen or Screen(make_console(on_stderr=as_json))
    check_store(point.config, Path(point.config.output).absolute())
    if point.config.tracking.kind is TrackingKind.none:  # otherwise the tracker does it
        complete_left_behind(Path(point.config.output).absolute())
    return carry_out(point, _OwnRanks(entry), screen, admission, as_json=as_json)


class Ranks(Protocol):
    """The ranks of one run in the foreground: those that this command starts, or those of another launcher."""

    def signals(self) -> AbstractContextManager[None]:
        """What a signal to this process does while the run goes on."""

    def refused(self, attempt: Attempt) -> None:
        """Called instead of `followed` if the run is not admitted."""

    def followed(self, point: Point, attempt: Attempt, screen: Screen, tracker: Tracker) -> Verdict:
        """Shows what the ranks record until they have ended, and records how they did."""

    def closing_rows(self, point: Point, attempt: Attempt) -> list[Row]:
        """What the last lines of the screen say after the path of the records."""


def carry_out(point: Point, ranks: Ranks, screen: Screen, admission: Admission | None, *, as_json: bool = False) -> int:
    """Records, tracks and shows a run from its admission to its result. Returns the exit code."""
    attempt, tracker = _begin(point, screen)
    try:
        with ranks.signals():
            verdict = None
            # The memory is predicted while the tracker imports its libraries.
            if admission is None or admission.admits(point, attempt, screen, quiet=as_json):
                tracker.wait_for_store()
                verdict = ranks.followed(point, attempt, screen, tracker)
            else:
                ranks.refused(attempt)
        code = comparison.exit_code_of({attempt.state})
        if verdict is not None:
            tell(screen, point, attempt, verdict)
    except KeyboardInterrupt:
        if not attempt.state.final:
            attempt.move(RunState.cancelled, message="the command was stopped")
        screen.say("stopped: nothing is left running", "bold red")
        code = INTERRUPTED
    finally:
        screen.closing([Row("records", shown(attempt.paths.root)), *ranks.closing_rows(point, attempt)])
        tracker.close()
        for warning in tracker.warnings():
            screen.warn(warning)
        if as_json:
            print(_document(point, attempt))
    return code


def _begin(point: Point, screen: Screen) -> tuple[Attempt, Tracker]:
    """Creates the attempt, shows its configuration and starts the tracker."""
    config = point.config
    output = Path(config.output).absolute()
    name = hardware.detect().name(config.resources.device)
    attempt = new_attempt(output, to_dict(config), point.label, name)
    tracker = start_tracker(config, output, attempt.paths)
    screen.plan(point.label, config, shown(attempt.paths.root))
    return attempt, tracker


def _document(point: Point, attempt: Attempt) -> str:
    """The run as one JSON document, with the same keys as a point in a sweep's document."""
    document = {
        "label": point.label,
        "state": attempt.state.value,
        "message": attempt.message,
        "overrides": point.overrides,
        "point": attempt.point,
        "attempt": str(attempt.paths.root),
        "result": read_or_warn(attempt.paths.result, RESULT) if attempt.state.measured else None,
    }
    return json.dumps(document, ensure_ascii=False)


class _OwnRanks:
    """The ranks of a run on this machine, started here. However it ends, none of their processes is left."""

    def __init__(self, entry: str) -> None:
        self._entry = entry

    def signals(self) -> AbstractContextManager[None]:
        return signals_interrupt()

    def refused(self, attempt: Attempt) -> None:
        """Nothing has been started."""

    def followed(self, point: Point, attempt: Attempt, screen: Screen, tracker: Tracker) -> Verdict:
        with screen.passing() as told:
            lease = waited_slots(point.config, told or screen.say)
        with lease:
            screen.begin(point.config)
            try:
                run = PointRun(point, attempt, self._entry, lease.gpus)
            except Exception as error:
                screen.end()
                return record(attempt, Verdict(RunState.error, 0, f"could not be run: {type(error).__name__}: {error}"))
            try:
                return _shown_to_the_end(run, screen, tracker)
            finally:
                # It changes nothing if the run has ended; after an exception or an interrupt it leaves no process.
                run.cancel("the command was stopped")
                screen.end()

    def closing_rows(self, point: Point, attempt: Attempt) -> list[Row]:
        rows = next_rows(point, attempt)
        if attempt.state is RunState.pruned or point.config.tracking.kind is TrackingKind.none:
            return rows
        return [Row("dashboard", dashboard(Path(point.config.output))), *rows]


def _shown_to_the_end(run: PointRun, screen: Screen, tracker: Tracker) -> Verdict:
    while True:
        for event in run.new_events():
            screen.event(event)
        verdict = run.look()
        if verdict is not None:
            # What the ranks recorded after the last look, such as their last step.
            for event in run.new_events():
                screen.event(event)
            return verdict
        for warning in tracker.warnings():
            screen.warn(warning)
        time.sleep(LOOK_S)


def tell(screen: Screen, point: Point, attempt: Attempt, verdict: Verdict) -> None:
    """Shows how the point ended."""
    if verdict.state.measured:
        screen.success(result_of(attempt.paths), verdict.note, to_dict(point.config))
        return
    lines, path = watch.last_words(attempt.paths, verdict.rank)
    shown_lines = [] if watch.is_explained(attempt.paths, verdict.rank) else lines
    screen.failure(point.label, verdict.state.value, verdict.message, shown_lines, shown(path))


def next_rows(point: Point, attempt: Attempt) -> list[Row]:
    """The next command to type. A cancelled run gets one only if the command would resume from its checkpoint."""
    if attempt.state.measured:
        if point.config.trains_to_the_end:
            return trained.closing_rows(point.overrides, to_dict(point.config), result_of(attempt.paths))
        return [Row("next", next_after_run(point))]
    if attempt.state is RunState.pruned:
        return admission.next_rows(point, attempt)
    again = summary.run_command(point.overrides)
    if attempt.state is not RunState.cancelled:
        place = wings.load(wings.PLACE_TO_MEND)(attempt.message)
        return [Row("next", f"correct {place}, then type the command again" if place else again)]
    goes_on = point.config.checkpoint.resume == "auto" and any(attempt.paths.checkpoints.glob("step-*"))
    return [Row("next", f"{again}     # resumes from its last checkpoint")] if goes_on else []
