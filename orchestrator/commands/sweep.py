"""Runs the command of a sweep: decide, show the plan, start the controller, watch, compare."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.commands import watch_sweep
from orchestrator.commands.watch_sweep import Choice, SweepWatch
from orchestrator.config.cluster import ClusterKind
from orchestrator.config.schema import Device, RunConfig, TrackingKind, from_dict
from orchestrator.config.strict import Broken, Refusal
from orchestrator.exit_codes import BAD_USAGE, INTERRUPTED, OK
from orchestrator.launch.rank import ENTRY
from orchestrator.launch.verdict import end_of
from orchestrator.machine import children, slots
from orchestrator.machine.hardware import Hardware, short_name
from orchestrator.machine.processes import started
from orchestrator.plan import decision, prediction
from orchestrator.plan.decision import Refused, Wishes
from orchestrator.plan.point import Point
from orchestrator.plan.rules.output import place_problems
from orchestrator.records import sweep_record
from orchestrator.records.record_file import read_or_warn, write_json_atomic
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import TAKEN, Planned, SweepPaths
from orchestrator.report import comparison, sweep_table
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row
from orchestrator.slurm import site as slurm_site
from orchestrator.slurm import sweep as slurm_sweep
from orchestrator.slurm import tools as slurm_tools
from orchestrator.text.paths import shown, verb
from orchestrator.text.streams import complain
from orchestrator.text.units import many
from orchestrator.tracking.feed import check_store, complete_left_behind, start_sync


@dataclass(frozen=True)
class SweepRequest:
    """A requested sweep with at least one point to run. `command`: the arguments that resume it."""

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


def run_sweep(request: SweepRequest, hardware: Hardware, screen: Screen | None = None) -> int:
    """Returns the exit code of `comparison.exit_code`, or 130 if it was stopped."""
    code, sweep = swept(request, hardware, screen or Screen(make_console(on_stderr=request.as_json)))
    if request.as_json and sweep is not None:
        standings = sweep_record.standings(sweep)
        print(sweep_table.document(sweep, standings))
    return code


def swept(request: SweepRequest, hardware: Hardware, screen: Screen) -> tuple[int, SweepPaths | None]:
    """The same, and the records of the sweep; None if it only showed its plan, or can never run."""
    if request.predicts and not request.as_json:
        screen.say(
            f"{many(len(request.points), 'point')}: predicting {'their' if len(request.points) > 1 else 'its'} memory",
            "dim",
        )
    planned = decided(request, hardware, screen)
    if request.plan_only or not any(point.decision is RunState.queued for point in planned):  # else its tracker does it
        complete_left_behind(_output(request).absolute())
    # A product of axes may contain combinations that no rule allows. They are rows of the table: refusing the sweep for
    # them would make people write exclusions, and dropping them would hide mistakes. Only if all are refused is it an
    # error. Nothing asks for confirmation, which would block scripts; --plan shows what would run.
    if all(point.decision is RunState.refused for point in planned):
        raise Refusal(list(dict.fromkeys(point.reason for point in planned)))
    if request.plan_only:
        return _show_plan_only(request, planned, screen), None
    _check_places(request)
    return _carried_out(request, planned, screen)


def _carried_out(request: SweepRequest, planned: list[Planned], screen: Screen) -> tuple[int, SweepPaths | None]:
    """Runs, sends or joins the sweep. Returns the exit code and the records; None if the cluster can never run it."""
    if problems := _problems_of_cluster(request, planned):
        for problem in problems:
            screen.say(f"error: {problem}", "bold red")
        screen.say("nothing was sent (exit 2)")
        return BAD_USAGE, None
    begun = _begin(request, planned, screen)
    sweep = begun.sweep
    if begun.is_joined:
        return _joined(sweep, screen), sweep
    if begun.jobs:
        arrays = ", ".join(dict.fromkeys(job.partition("_")[0] for job in begun.jobs))
        screen.say(f"sent {many(len(begun.jobs), 'point')} as {arrays}; this terminal may be closed", "bold")
        screen.closing(_left_running(sweep))
        return OK, sweep
    _show_plan(sweep, planned, screen)
    if begun.process is not None and not request.detach:
        return watch(sweep, screen, begun.process), sweep
    if begun.process is not None:
        screen.closing(_left_running(sweep))
        return OK, sweep
    code = watch_sweep.conclude(sweep, screen)
    _track_kept(sweep)
    screen.closing(_next(sweep))
    return code, sweep


def _track_kept(sweep: SweepPaths) -> None:
    """Writes a sweep whose answers were all there to MLflow, in the background; other sweeps have a tracker."""
    if (read_or_warn(sweep.sweep) or {}).get("tracked"):
        start_sync(sweep.output, [sweep])


class Begun(NamedTuple):
    """A sweep whose points have been started, or were started by another command (`is_joined`).

    process: its controller on this machine. jobs: the ids of its jobs on a cluster. Neither, if no point needs a run.
    """

    sweep: SweepPaths
    is_joined: bool = False
    process: subprocess.Popen[bytes] | None = None
    jobs: Sequence[str] = ()


def _begin(request: SweepRequest, planned: list[Planned], screen: Screen | None = None) -> Begun:
    """Opens the sweep's folder, and starts the points that need a run or sends them to the cluster.

    Starters of one output take turns, so that the second of two equal commands joins the sweep of the first.
    """
    with sweep_record.only_starter(_output(request)):
        running = _running(request, planned)
        if running is not None:
            return Begun(running, is_joined=True)
        sweep = sweep_record.open_sweep(_output(request), request.name, planned, _facts(request))
        if not _queued_configs(planned):
            return Begun(sweep)
        if not _on_cluster(_runnable(request)):
            return Begun(sweep, process=_start_controller(sweep, request))
        if screen is not None:
            for caution in slurm_site.cautions(_queued_configs(planned)):
                screen.warn(caution)
            _show_plan(sweep, planned, screen)
        return Begun(sweep, jobs=slurm_sweep.send(sweep, planned, request.entry))


def _show_plan(sweep: SweepPaths, planned: Sequence[Planned], screen: Screen) -> None:
    screen.sweep_plan(planned, shown(sweep.root))
    screen.rows(_cost_rows(_queued_configs(planned)))


def _joined(running: SweepPaths, screen: Screen) -> int:
    """Shows a sweep that another command started."""
    on_cluster = sweep_record.is_on_cluster(running)
    where = "with the cluster" if on_cluster else "running"
    screen.say(f"this sweep is {where} already: {sweep_table.counts(sweep_record.standings(running))}")
    if not on_cluster:
        return watch(running, screen, attached=False)
    screen.closing(_left_running(running))
    return OK


def _problems_of_cluster(request: SweepRequest, planned: Sequence[Planned]) -> list[str]:
    """Reasons why the cluster can never run the points that it would be sent. Checked before anything is written."""
    configs = _queued_configs(planned)
    if not configs or not _on_cluster(_runnable(request)) or _running(request, planned) is not None:
        return []
    return slurm_site.preflight(configs)


def _queued_configs(planned: Sequence[Planned]) -> list[RunConfig]:
    """The configurations of the points that need a run."""
    return [from_dict(point.config) for point in planned if point.decision is RunState.queued]


def _cost_rows(configs: Sequence[RunConfig]) -> list[Row]:
    """The cost of the points that need a run: slots of this machine, or time of a cluster."""
    if not configs:
        return []
    if configs[0].cluster.kind is ClusterKind.slurm:
        return [Row("cost", _cost(configs))]
    pools = {config.resources.device: len(slots.pool_of(config.resources.device).slots) for config in configs}
    taken = Counter(
        (config.resources.device, min(slots.wanted(config.resources), pools[config.resources.device]))
        for config in configs
    )
    texts = []
    for (device, count), points in taken.items():
        word = "GPUs" if device is Device.cuda else "cores"
        at_a_time = 1 if configs[0].cluster.exclusive else pools[device] // max(count, 1)
        taking = f"{points} points take" if points > 1 else "1 point takes"
        texts.append(f"{taking} {count} of {pools[device]} {word} each: {at_a_time} at a time")
    return [Row("slots", "; ".join(texts))]


def _cost(configs: Sequence[RunConfig]) -> str:
    """An upper bound on the cost of the points, from their time limits."""
    node_h = sum(config.resources.nodes * config.resources.time_limit_min for config in configs) / 60
    text = f"at most {node_h:.1f} node-hours"
    gpu_h = sum(config.resources.ranks * config.resources.time_limit_min for config in configs) / 60
    if configs[0].resources.device is Device.cuda:
        text += f" = {gpu_h:.1f} GPU-hours"
        price = configs[0].cluster.usd_per_gpu_hour
        text += f" = {gpu_h * price:.2f} USD" if price is not None else ""
    return text


def run_quietly(request: SweepRequest, hardware: Hardware, screen: Screen | None = None) -> SweepPaths:
    """Runs a sweep and returns when it has ended. An interrupt cancels it and is raised again. screen: shows the
    progress; None shows nothing.

    A sweep that another command began is waited for, and an interrupt does not cancel it.
    """
    planned = decided(request, hardware)
    _check_places(request)
    if problems := _problems_of_cluster(request, planned):
        raise slurm_tools.SlurmError("; ".join(problems))
    begun = _begin(request, planned)
    try:
        if screen is not None and begun.process is not None:
            process = begun.process
            SweepWatch(begun.sweep, screen, lambda: process.poll() is None).until_end()
        if begun.process is None or begun.process.wait() == TAKEN:
            _await(begun.sweep)
    except KeyboardInterrupt:
        if begun.jobs:
            slurm_sweep.cancel(begun.sweep, [point.label for point in planned])
        if begun.process is not None:
            sweep_record.ask(begun.sweep, "cancel")
            begun.process.wait()
        raise
    if not begun.is_joined:
        comparison.write(begun.sweep)
    if begun.process is None and not begun.jobs and not begun.is_joined:
        _track_kept(begun.sweep)
    return begun.sweep


def _check_places(request: SweepRequest) -> None:
    """Raises Refusal before anything starts: if outputs, slot locks or the tracking store cannot be written, or if the
    ranks cannot meet."""
    if problems := place_problems(str(_output(request)), starts_ranks=not _on_cluster(_runnable(request))):
        raise Refusal(problems)
    check_store(_runnable(request)[0].config, _output(request).absolute())


def _await(sweep: SweepPaths) -> None:
    """Returns when the sweep makes no more progress without a new command."""
    if sweep_record.is_on_cluster(sweep):
        view = slurm_sweep.ClusterView(sweep)
        while not all(standing.state.final for standing in view.look()):
            time.sleep(watch_sweep.CLUSTER_LOOK_S)
    while sweep_record.controller_pid(sweep) is not None:
        time.sleep(watch_sweep.LOOK_S)


def decided(request: SweepRequest, hardware: Hardware, screen: Screen | None = None) -> list[Planned]:
    """The points of the sweep, predicted and decided. Nothing is started but the process that counts."""
    points = _runnable(request)
    tell = None if screen is None or request.as_json else partial(screen.say, style="dim")
    unknown: dict[str, str] = {}
    predicted = prediction.predict(points, tell, unknown=unknown) if request.predicts else {}
    wrong = prediction.problems(points) if request.predicts else {}
    some = len(wrong) < len(points)  # otherwise it is raised as an error
    for problem, count in Counter(wrong.values()).items() if some else ():
        complain(f"refused: {problem}      ({count} of {len(request.points)} points)")
    judged = [
        Refused(point.label, point.overrides, (Broken(wrong[point.label]),)) if point.label in wrong else point
        for point in request.points
    ]
    name_of: Callable[[RunConfig], str] = partial(_hardware_name, hardware)
    if _on_cluster(points):
        name_of = slurm_sweep.names()
    planned = decision.decide(judged, _output(request), name_of, request.wishes, predicted)
    may_run = [point.decision is not RunState.refused for point in planned]
    return [
        replace(point, predicted={"unknown": unknown[point.label]}) if runs and point.label in unknown else point
        for point, runs in zip(planned, may_run, strict=True)
    ]


def _hardware_name(hardware: Hardware, config: RunConfig) -> str:
    """The name of the hardware in the point's identity: of the described GPUs, or of this machine."""
    node = config.hardware
    return short_name(node.gpu or node.name) if node.is_described else hardware.name(config.resources.device)


def _on_cluster(points: Sequence[Point]) -> bool:
    return points[0].config.cluster.kind is ClusterKind.slurm


def _runnable(request: SweepRequest) -> list[Point]:
    return [point for point in request.points if isinstance(point, Point)]


def _output(request: SweepRequest) -> Path:
    return Path(_runnable(request)[0].config.output)


def _facts(request: SweepRequest) -> dict[str, Any]:
    """The facts that a later command needs to resume the sweep, and the policies that the controller needs."""
    config = _runnable(request)[0].config
    return {
        "command": list(request.command),
        "folder": str(Path.cwd()),
        "rank_by": request.rank_by,
        "prune": request.wishes.prune,
        "exclusive": config.cluster.exclusive,
        "on_cluster": config.cluster.kind is ClusterKind.slurm,
        "tracked": config.tracking.kind is not TrackingKind.none,
    }


def _show_plan_only(request: SweepRequest, planned: list[Planned], screen: Screen) -> int:
    if request.as_json:
        print(json.dumps([point.to_dict() for point in planned], ensure_ascii=False))
    else:
        screen.table(sweep_table.plan_table(planned))
        described = sweep_table.hardware_rows(planned)
        on_cluster = _on_cluster(_runnable(request))
        # Points on described hardware take no slots of this machine.
        configs = [one for one in _queued_configs(planned) if not one.hardware.is_described or on_cluster]
        rows = [*sweep_table.plan_rows(planned), *described, *_cost_rows(configs)]
        states = {point.decision for point in planned}
        there = "with these GPUs, " if described else ""
        then = f"{there}the same line without --plan runs it" if RunState.queued in states else "nothing is left to run"
        if RunState.pruned in states:
            then += "; --prune off also runs the pruned points"
        screen.closing([*rows, Row("next", then)])
    return OK


def _running(request: SweepRequest, planned: Sequence[Planned]) -> SweepPaths | None:
    """The same sweep if another controller or a cluster is running it, else None."""
    identity = sweep_record.sweep_id(request.name, planned)
    for sweep in sweep_record.all_sweeps(_output(request)):
        if not sweep_record.is_sweep(sweep, request.name, identity):
            continue
        if sweep_record.controller_pid(sweep):
            return sweep
        on_cluster = sweep_record.is_on_cluster(sweep)
        if on_cluster and not all(standing.state.final for standing in slurm_sweep.ClusterView(sweep).look()):
            return sweep
    return None


def _start_controller(sweep: SweepPaths, request: SweepRequest) -> subprocess.Popen[bytes]:
    """Starts the controller in a separate session: Ctrl-C reaches only this command, which asks what to do."""
    line = children.words("orchestrator.launch.controller", str(sweep.root), "--entry", request.entry)
    if not request.detach:
        line += ["--viewer", str(os.getpid())]
    process = children.start(line, os.environ, sweep.log)
    # The controller records itself a moment later. Until then this claim shows that the sweep has a controller.
    try:
        write_json_atomic(sweep.claim, {"pid": process.pid, "started": started(process.pid)})
    except OSError:  # a full disk: this command ends with the error, and the controller would run on without a viewer
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process


def watch(
    sweep: SweepPaths, screen: Screen, process: subprocess.Popen[bytes] | None = None, *, attached: bool = True
) -> int:
    """Shows the sweep until it has ended or the user leaves; then the comparison, if it has ended.

    `process`: the controller, if this command started it. `attached`: Ctrl-C asks what to do with the sweep. If False,
    the sweep belongs to another command and continues.
    """
    alive = (lambda: process.poll() is None) if process else None
    view = SweepWatch(sweep, screen, alive, attached=attached)
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
    if code == TAKEN:
        return _joined(sweep, screen)
    if code not in (0, INTERRUPTED):
        reason = "".join(f"{line}; " for line in end_of(sweep.log)[-1:])
        screen.warn(f"the sweep's controller ended early: {reason}see {shown(sweep.log)}")
    code = watch_sweep.conclude(sweep, screen)
    screen.closing(_next(sweep))
    return INTERRUPTED if interrupted else code


def _left_running(sweep: SweepPaths) -> list[Row]:
    return [Row("watch", verb("watch", sweep.root)), Row("stop", verb("cancel", sweep.root))]


def _next(sweep: SweepPaths) -> list[Row]:
    """The paths of the results and the next command to type."""
    rows = [Row("report", shown(sweep.report)), Row("page", shown(sweep.page)), Row("numbers", shown(sweep.results))]
    if (read_or_warn(sweep.sweep) or {}).get("tracked"):
        rows.append(Row("dashboard", verb("ui", sweep.root)))
    return [*rows, sweep_table.next_row(sweep, sweep_record.standings(sweep), runs=False)]
