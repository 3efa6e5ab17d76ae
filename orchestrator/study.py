"""The sequence of one command: each point submitted, watched, recorded and told; then their comparison."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from orchestrator import hardware, launch, report, summary, watch
from orchestrator.job import ENTRY
from orchestrator.point import Point
from orchestrator.record import Attempt, EventTail, SweepPaths, new_attempt, new_sweep, read_json
from orchestrator.report import Entry
from orchestrator.run_state import RunState
from orchestrator.schema import TrackingKind, to_dict
from orchestrator.screen import Screen
from orchestrator.summary import Row
from orchestrator.tracking_feed import Tracker, experiment_name, start_tracker
from orchestrator.watch import Verdict, Watch

LOOK_S = 0.2
OK, FAILED, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class Desk:
    """What every point of one command shares."""

    output: Path
    screen: Screen
    tracker: Tracker
    sweep: SweepPaths | None
    entry: str

    @property
    def sweep_name(self) -> str:
        return self.sweep.name if self.sweep else ""


class Stopped(KeyboardInterrupt):
    """Somebody asked the command to stop with a signal that is not Ctrl-C."""


def run_points(
    points: Sequence[Point],
    *,
    sweep_name: str | None,
    output: str | Path,
    entry: str = ENTRY,
    screen: Screen | None = None,
) -> int:
    """Runs the points one after another, so that none disturbs another's numbers. Call it from the main thread.

    Returns 0 when every point has a result, 1 when some have none, 130 when it was stopped; in every case no process
    of ours is left. With `sweep_name` the points are compared, and the comparison lies in a folder of that name.
    """
    folder = Path(output).absolute()
    tracker = start_tracker(points[0].config, folder)
    screen = screen or Screen()
    sweep = None
    if sweep_name is not None:
        asked = [{"label": point.label, "overrides": list(point.overrides)} for point in points]
        sweep = new_sweep(folder, sweep_name, asked)
        screen.sweep_plan([point.label for point in points], shown(sweep.root))
    desk = Desk(folder, screen, tracker, sweep, entry)
    entries: list[Entry] = []
    try:
        with _signals_interrupt():
            for point in points:
                entries.append(run_point(desk, point))  # noqa: PERF401 - one that is stopped keeps those before
            code = OK if all(entry.result for entry in entries) else FAILED
    except KeyboardInterrupt:
        screen.say(f"stopped: {len(entries)} of {len(points)} points are done, nothing is left running", "bold red")
        code = INTERRUPTED
    finally:
        _conclude(desk, points, entries)
    return code


def run_point(desk: Desk, point: Point) -> Entry:
    """One point from its folder to its summary. Only being stopped is raised, after all of it was ended."""
    device = point.config.resources.device
    attempt = new_attempt(desk.output, to_dict(point.config), point.label, hardware.detect().name(device))
    desk.screen.plan(point.label, point.config, shown(attempt.paths.root))
    desk.tracker.wait_for_store()
    desk.tracker.begin(attempt, experiment_name(point.config), desk.sweep_name)
    try:
        verdict = _run(desk, point, attempt)
    except KeyboardInterrupt:
        attempt.move(RunState.cancelled, message="the command was stopped")
        raise
    except Exception as error:  # the point is lost, the others are not
        verdict = Verdict(RunState.error, 0, f"could not be run: {type(error).__name__}: {error}")
        record(attempt, verdict)
    finally:
        desk.tracker.end(attempt)
    return tell(desk.screen, point, attempt, verdict, in_sweep=desk.sweep is not None)


def _run(desk: Desk, point: Point, attempt: Attempt) -> Verdict:
    """Starts the ranks and follows them to a verdict; on return, however, none of their processes is left."""
    resources = point.config.resources
    world = resources.ranks or 1
    desk.screen.begin(point.config)
    job = launch.submit(attempt.paths, point.config, desk.entry)
    try:
        attempt.move(RunState.starting, controller=job.session)
        limit_s = 60 * resources.time_limit_min
        verdict = follow(desk, attempt, Watch(attempt.paths, world, limit_s, job.controller_alive))
        if verdict.state is RunState.timeout:
            verdict = _with_stack(attempt, world, verdict)
    finally:
        with _signals_ignored():
            job.end()
            desk.screen.end()
    record(attempt, verdict)
    return verdict


def _with_stack(attempt: Attempt, world: int, verdict: Verdict) -> Verdict:
    """Every rank's log now ends with where it stood."""
    stuck = watch.ask_where(attempt.paths, world)
    if stuck is None:
        return verdict
    return verdict._replace(rank=stuck, message=f"{verdict.message}: the others waited for rank {stuck}")


def follow(desk: Desk, attempt: Attempt, watching: Watch) -> Verdict:
    """Shows what the ranks record until the watch has a verdict."""
    tail = EventTail(attempt.paths.metrics)
    step = 0
    while True:
        verdict = watching.look()
        if attempt.state is RunState.starting and (watching.all_running or verdict is not None):
            attempt.move(RunState.running)
        for event in tail.read_new():
            desk.screen.event(event)
            step = event.get("step", step)
        if verdict is not None:
            reached = "" if verdict.state is RunState.ok else f", after step {step}"
            return verdict._replace(message=verdict.message + reached)
        for warning in desk.tracker.warnings():
            desk.screen.warn(warning)
        time.sleep(LOOK_S)


def record(attempt: Attempt, verdict: Verdict) -> None:
    """Writes how the attempt ended; of a failure also the last lines of the log that tells why."""
    if verdict.state is RunState.ok:
        result = read_json(attempt.paths.result)
        assert result is not None
        attempt.move(watch.success(result), **({"note": verdict.note} if verdict.note else {}))
    else:
        lines, _ = watch.last_words(attempt.paths, verdict.rank)
        attempt.move(verdict.state, rank=verdict.rank, message=verdict.message, log=lines)


def tell(screen: Screen, point: Point, attempt: Attempt, verdict: Verdict, *, in_sweep: bool) -> Entry:
    """Shows how the point ended, and what the comparison will need of it."""
    folder = str(attempt.paths.root)
    if verdict.state is RunState.ok:
        result = read_json(attempt.paths.result)
        assert result is not None
        (screen.brief if in_sweep else screen.success)(result, verdict.note)
        return Entry(point.label, "ok", result, folder=folder, overrides=point.overrides)
    lines, path = watch.last_words(attempt.paths, verdict.rank)
    screen.failure(point.label, verdict.state.value, verdict.message, lines, shown(path))
    return Entry(point.label, verdict.state.value, None, verdict.message, folder, point.overrides)


def _conclude(desk: Desk, points: Sequence[Point], entries: Sequence[Entry]) -> None:
    """The comparison where there is one, where everything lies, and what to type next."""
    ranked = report.rank(entries)
    rows: list[Row] = []
    if desk.sweep is not None and ranked:
        desk.sweep.report.write_text(report.report_md(desk.sweep.name, ranked), encoding="utf-8")
        desk.sweep.results.write_text(report.results_csv(ranked), encoding="utf-8")
        desk.screen.comparison(ranked)
        files = [str(desk.sweep.report), str(desk.sweep.results)]
        table = report.markdown(report.table(ranked))
        desk.tracker.summary(experiment_name(points[0].config), desk.sweep.name, table, files)
        rows += [Row("report", shown(desk.sweep.report)), Row("numbers", shown(desk.sweep.results))]
    elif ranked:
        rows.append(Row("records", shown(Path(ranked[0].entry.folder))))
    if points[0].config.tracking.kind is not TrackingKind.none:
        rows.append(Row("dashboard", f"python -m orchestrator.tracking ui {shown(desk.output)}"))
    if ranked:
        rows.append(Row("next", _next(desk, ranked)))
    desk.screen.closing(rows)
    desk.tracker.close()
    for warning in desk.tracker.warnings():
        desk.screen.warn(warning)


def _next(desk: Desk, ranked: Sequence[report.Ranked]) -> str:
    first = ranked[0].entry
    if desk.sweep is not None or first.result is None:
        return report.next_after_sweep(ranked)
    return summary.next_after_run(first.overrides)


def shown(path: Path) -> str:
    """The path as short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """A polite end of the terminal or from `kill` unwinds as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(signal.Signals(number).name)

    before = {one: signal.signal(one, stop) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """For the moments in which a second Ctrl-C would leave processes behind."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.signal(one, signal.SIG_IGN) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
