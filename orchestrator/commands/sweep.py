"""Runs the command of a sweep: decide, show the plan, start the controller, watch, compare."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.commands import watch_sweep
from orchestrator.commands.watch_sweep import Choice, SweepWatch
from orchestrator.config.cluster import ClusterKind
from orchestrator.config.schema import RunConfig, TrackingKind
from orchestrator.config.strict import Broken, Refusal
from orchestrator.exit_codes import INTERRUPTED, OK
from orchestrator.launch.cluster import SentPoints, SweepCluster, cluster, cluster_of
from orchestrator.launch.rank import ENTRY
from orchestrator.launch.verdict import end_of
from orchestrator.machine.hardware import Hardware
from orchestrator.planning import decision
from orchestrator.planning.point import Point, Refused, Wishes
from orchestrator.planning.predictor import Tell, predictor
from orchestrator.planning.rules.output import place_problems
from orchestrator.records import sweep_record
from orchestrator.records.record_file import read_or_warn
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import TAKEN, Planned, SweepPaths
from orchestrator.report import comparison, sweep_table
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row
from orchestrator.text.paths import shown, verb
from orchestrator.text.streams import complain
from orchestrator.text.units import many
from orchestrator.tracking.feed import check_store, complete_left_behind, start_sync


@dataclass(frozen=True)
class SweepRequest:
    """A requested sweep with at least one point to run. `command`: the arguments that resume it. `study`: the identity
    of a sweep whose points are proposed one after the other; empty for that of its name and points. `began`: when the
    study did."""

    name: str
    points: tuple[Point | Refused, ...]
    command: tuple[str, ...]
    wishes: Wishes = field(default_factory=Wishes)
    rank_by: str = ""
    plan_only: bool = False
    detach: bool = False
    as_json: bool = False
    predicts: bool = True
    entry: str = ENTRY
    study: str = ""
    began: float = 0.0

    @cached_property
    def runnable(self) -> list[Point]:
        """The points that break no rule."""
        return [point for point in self.points if isinstance(point, Point)]

    @property
    def config(self) -> RunConfig:
        """A configuration with what all points of a sweep share: output, cluster and tracking."""
        return self.runnable[0].config

    @property
    def output(self) -> Path:
        return Path(self.config.output)

    @cached_property
    def cluster(self) -> SweepCluster:
        return cluster(self.config.cluster.kind)

    @property
    def on_cluster(self) -> bool:
        return self.config.cluster.kind is not ClusterKind.local

    def facts(self) -> dict[str, Any]:
        """What a later command needs to resume the sweep, and the policies that the controller needs."""
        return {
            "command": list(self.command),
            "folder": str(Path.cwd()),
            "rank_by": self.rank_by,
            "prune": self.wishes.prune,
            "exclusive": self.config.cluster.exclusive,
            "on_cluster": self.on_cluster,
            "tracked": self.config.tracking.kind is not TrackingKind.none,
            **({"id": self.study, "time": self.began} if self.study else {}),
        }

    def running(self, planned: Sequence[Planned]) -> SweepPaths | None:
        """The same sweep, if another controller or a cluster is running it."""
        identity = self.study or sweep_record.sweep_id(self.name, planned)
        same = (one for one in sweep_record.all_sweeps(self.output) if sweep_record.is_sweep(one, self.name, identity))
        return next((sweep for sweep in same if cluster_of(sweep).runs(sweep)), None)


def run_sweep(request: SweepRequest, hardware: Hardware, screen: Screen | None = None) -> int:
    """Returns the exit code of `comparison.exit_code`, or 130 if it was stopped."""
    code, sweep = swept(request, hardware, screen or Screen(make_console(on_stderr=request.as_json)))
    if request.as_json and sweep is not None:
        standings = sweep_record.standings(sweep)
        print(sweep_table.document(sweep, standings))
    return code


def swept(request: SweepRequest, hardware: Hardware, screen: Screen) -> tuple[int, SweepPaths | None]:
    """The same, and the records of the sweep; None if it only showed its plan."""
    if not request.plan_only:
        _check_place(request)
    if request.predicts and not request.as_json:
        screen.say(
            f"{many(len(request.points), 'point')}: predicting {'their' if len(request.points) > 1 else 'its'} memory",
            "dim",
        )
    planned = decided(request, hardware, screen)
    if request.plan_only or not any(point.decision is RunState.queued for point in planned):  # else its tracker does it
        complete_left_behind(request.output.absolute())
    # A product of axes may contain combinations that no rule allows. They are rows of the table: refusing the sweep for
    # them would make people write exclusions, and dropping them would hide mistakes. Only if all are refused is it an
    # error. Nothing asks for confirmation, which would block scripts; --plan shows what would run.
    if all(point.decision is RunState.refused for point in planned):
        raise Refusal(list(dict.fromkeys(point.reason for point in planned)))
    if request.plan_only:
        return _show_plan_only(request, planned, screen), None
    begun = _begin(request, planned, screen)
    return _followed(begun, screen, detach=request.detach), begun.sweep


def run_quietly(request: SweepRequest, hardware: Hardware, screen: Screen | None = None) -> SweepPaths:
    """Runs a sweep and returns when it has ended. An interrupt cancels it and is raised again. screen: shows the
    progress; None shows nothing.

    A sweep that another command began is waited for, and an interrupt does not cancel it.
    """
    _check_place(request)
    begun = _begin(request, decided(request, hardware, tell=None if screen is None else screen.say))
    sweep, process = begun.sweep, begun.sent.process
    try:
        if screen is not None and process is not None:
            # A study says a line for each of its trials.
            SweepWatch(sweep, screen, lambda: process.poll() is None, says_points=not request.study).until_end()
        if process is None or process.wait() == TAKEN:
            while cluster_of(sweep).runs(sweep):
                time.sleep(watch_sweep.pause_s(sweep))
    except KeyboardInterrupt:
        if begun.is_own:
            request.cluster.cancel(sweep)
        if process is not None:
            process.wait()
        raise
    if not begun.is_joined and not request.study:  # a study does both once, at its end
        comparison.write(sweep)
        if not begun.is_own:
            track_kept(sweep)
    return sweep


class Begun(NamedTuple):
    """A sweep whose points that need a run were sent, or were sent by another command (`is_joined`)."""

    sweep: SweepPaths
    sent: SentPoints = SentPoints()
    is_joined: bool = False

    @property
    def is_own(self) -> bool:
        """Whether this command has sent points."""
        return self.sent != SentPoints()


def _check_place(request: SweepRequest) -> None:
    """Refusal, before memory is predicted: outputs or slot locks cannot be written, or the ranks cannot meet."""
    if problems := place_problems(str(request.output), starts_ranks=not request.on_cluster):
        raise Refusal(problems)


def _begin(request: SweepRequest, planned: Sequence[Planned], screen: Screen | None = None) -> Begun:
    """Opens the sweep's folder, shows the plan and sends the points that need a run, unless it runs already.

    Refusal, before anything is written: the tracking store cannot be written, or the cluster can never run a point
    that it would be sent. Starters of one output take turns, so that the second of two equal commands
    joins the sweep of the first.
    """
    check_store(request.config, request.output.absolute())
    queued = _queued_configs(request, planned)
    # Before the lock is taken: a scheduler may answer slowly, and other starters of this output would wait for it.
    is_sent = queued and request.on_cluster and request.running(planned) is None
    if is_sent and (problems := request.cluster.preflight(queued)):
        raise Refusal(problems)
    with sweep_record.only_starter(request.output):
        if (running := request.running(planned)) is not None:
            return Begun(running, is_joined=True)
        sweep = sweep_record.open_sweep(request.output, request.name, planned, request.facts())
        if screen is not None:
            screen.sweep_plan(planned, shown(sweep.root))
            screen.rows(request.cluster.cost(queued))
        if not queued:
            return Begun(sweep)
        return Begun(sweep, request.cluster.send(sweep, planned, request.entry, detached=request.detach))


def _followed(begun: Begun, screen: Screen, *, detach: bool) -> int:
    """Shows the sweep until it has ended, or says how to look at it later. Returns the exit code."""
    sweep, (process, jobs) = begun.sweep, begun.sent
    if begun.is_joined:
        return _joined(sweep, screen)
    if process is not None and not detach:
        return watch(sweep, screen, process)
    if begun.is_own:
        if jobs:
            arrays = list(dict.fromkeys(job.partition("_")[0] for job in jobs))
            what = f"{many(len(arrays), 'job array' if '_' in jobs[0] else 'job')} ({', '.join(arrays)})"
            screen.say(f"sent {many(len(jobs), 'point')} as {what}; this terminal may be closed", "bold")
        screen.closing(_left_running(sweep))
        return OK
    code = watch_sweep.conclude(sweep, screen)
    track_kept(sweep)
    screen.closing(next_rows(sweep))
    return code


def track_kept(sweep: SweepPaths) -> None:
    """Writes a sweep whose answers were all there to MLflow, in the background; other sweeps have a tracker."""
    if (read_or_warn(sweep.sweep) or {}).get("tracked"):
        start_sync(sweep.output, [sweep])


def _joined(running: SweepPaths, screen: Screen) -> int:
    """Shows a sweep that another command started."""
    on_cluster = sweep_record.is_on_cluster(running)
    where = "with the cluster" if on_cluster else "running"
    screen.say(f"this sweep is {where} already: {sweep_table.counts(sweep_record.standings(running))}")
    if not on_cluster:
        return watch(running, screen, attached=False)
    screen.closing(_left_running(running))
    return OK


def _queued_configs(request: SweepRequest, planned: Sequence[Planned]) -> list[RunConfig]:
    """The configurations of the points that need a run."""
    queued = {point.label for point in planned if point.decision is RunState.queued}
    return [point.config for point in request.runnable if point.label in queued]


def decided(
    request: SweepRequest, hardware: Hardware, screen: Screen | None = None, *, tell: Tell | None = None
) -> list[Planned]:
    """The points of the sweep, predicted and decided. Nothing is started but the process that counts. tell: gets its
    progress if there is no screen."""
    points = request.runnable
    unknown: dict[str, str] = {}
    with nullcontext(tell) if screen is None else screen.passing(quiet=request.as_json) as said:
        predicted = predictor().predict(points, said, unknown=unknown) if request.predicts else {}
    wrong = predictor().problems(points) if request.predicts else {}
    judged = [
        Refused(point.label, point.overrides, (Broken(wrong[point.label]),)) if point.label in wrong else point
        for point in request.points
    ]
    name_of = request.cluster.namer(hardware)
    planned = decision.decide(judged, request.output, name_of, request.wishes, predicted)
    may_run = [point.decision is not RunState.refused for point in planned]
    # Else the plan that follows says it, or all are refused, which is an error.
    if any(may_run) and not request.study and (screen is None or (request.plan_only and request.as_json)):
        _tell_refused(planned)
    return [
        replace(point, predicted={"unknown": unknown[point.label]}) if runs and point.label in unknown else point
        for point, runs in zip(planned, may_run, strict=True)
    ]


def _tell_refused(planned: Sequence[Planned]) -> None:
    """One line on stderr for each reason."""
    refused = Counter(point.reason for point in planned if point.decision is RunState.refused)
    for problem, count in refused.items():
        complain(f"refused: {problem}      ({count} of {len(planned)} points)")


def _show_plan_only(request: SweepRequest, planned: list[Planned], screen: Screen) -> int:
    if request.as_json:
        print(json.dumps([point.to_dict() for point in planned], ensure_ascii=False))
    else:
        screen.table(sweep_table.plan_table(planned))
        described = sweep_table.hardware_rows(planned)
        rows = [*sweep_table.plan_rows(planned), *described, *request.cluster.cost(_queued_configs(request, planned))]
        states = {point.decision for point in planned}
        there = "with these GPUs and a folder's weights, " if described else ""
        then = f"{there}the same line without --plan runs it" if RunState.queued in states else "nothing is left to run"
        if RunState.pruned in states:
            then += "; --prune off also runs the pruned points"
        screen.closing([*rows, Row("next", then)])
    return OK


def watch(
    sweep: SweepPaths, screen: Screen, process: subprocess.Popen[bytes] | None = None, *, attached: bool = True
) -> int:
    """Shows the sweep until it has ended or the user leaves; then the comparison, if it has ended.

    `process`: the controller, if this command started it. `attached`: Ctrl-C asks what to do with the sweep. If False,
    the sweep belongs to another command and continues.
    """
    alive = (lambda: process.poll() is None) if process else None
    leaving = "detach, wait or cancel" if attached else "leave it running"
    view = SweepWatch(sweep, screen, alive, leaving=leaving)
    interrupted = False
    while True:
        try:
            view.until_end()
            break
        except KeyboardInterrupt:
            if not attached:
                screen.closing(_left_running(sweep))
                return INTERRUPTED
            choice = watch_sweep.ask_at_interrupt(sweep_record.standings(sweep))
            if choice is Choice.DETACH:
                sweep_record.ask(sweep, "detach")
                time.sleep(2 * watch_sweep.LOOK_S)  # the controller must have read the request before this process ends
                screen.closing(_left_running(sweep))
                return INTERRUPTED
            interrupted = choice is not Choice.GO_ON
            if interrupted:
                sweep_record.ask(sweep, "cancel" if choice is Choice.CANCEL else "drain")
    code = process.wait() if process is not None else 0
    # Another command's controller took this sweep after it was planned here.
    if code == TAKEN:
        return _joined(sweep, screen)
    if code not in (0, INTERRUPTED):
        reason = "".join(f"{line}; " for line in end_of(sweep.log)[-1:])
        screen.warn(f"the sweep's controller ended early: {reason}see {shown(sweep.log)}")
    # A controller of this command that ended well has written the report, and its warnings were shown: drawing it again
    # would take a second.
    code = watch_sweep.conclude(sweep, screen, writes=process is None or code != 0)
    screen.closing(next_rows(sweep))
    return INTERRUPTED if interrupted else code


def _left_running(sweep: SweepPaths) -> list[Row]:
    return [Row("watch", verb("watch", sweep.root)), Row("stop", verb("cancel", sweep.root))]


def next_rows(sweep: SweepPaths) -> list[Row]:
    """The paths of the results and the next command to type."""
    rows = [Row("report", shown(sweep.report)), Row("page", shown(sweep.page)), Row("numbers", shown(sweep.results))]
    if (read_or_warn(sweep.sweep) or {}).get("tracked"):
        rows.append(Row("dashboard", verb("ui", sweep.root)))
    return [*rows, sweep_table.next_row(sweep, sweep_record.standings(sweep), runs=False)]
