"""The records of a sweep on disk: its plan, the events of its controller, and the current state of each point."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from orchestrator.machine.locks import locked
from orchestrator.machine.processes import is_alive
from orchestrator.records.record_file import (
    BadRecord,
    EventTail,
    FileIn,
    append_event,
    clear_leftovers,
    make_room,
    read_or_warn,
    require_json,
    set_aside,
    warn_once,
    write_json_atomic,
)
from orchestrator.records.record_shapes import CONTROLLER, POINT, SWEEP, SWEEP_EVENTS
from orchestrator.records.run_record import SCHEMA, AttemptPaths, clear_point, result_of, settled
from orchestrator.records.run_state import RunState

TAKEN = 75  # exit code of a controller whose sweep already has one; EX_TEMPFAIL of sysexits.h


@dataclass(frozen=True)
class SweepPaths:
    """The files of one sweep."""

    root: Path

    sweep = FileIn("sweep.json")  # the command, the folder where it was typed, and the policies of the sweep
    plan = FileIn("plan.json")  # the points, with the decision about each
    events = FileIn("events.jsonl")  # the actions of the controller, one event a line
    requests = FileIn("requests.jsonl")  # requests of other commands to the controller
    controller = FileIn("controller.json")  # the process of the controller, written by the controller itself
    # The process that will be the controller, written by the command that has just started it.
    claim = FileIn("claim.json")
    log = FileIn("controller.log")
    report = FileIn("report.md")
    results = FileIn("results.csv")
    page = FileIn("report.html")
    picture = FileIn("report.png")
    pictures = FileIn("pictures")  # the pictures of report.md, as SVG

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def output(self) -> Path:
        return self.root.parent.parent


@dataclass(frozen=True)
class Planned:
    """A point of a sweep and the decision about it: queued if it is to run, else a state that needs no run.

    point: its id; empty if it was refused. attempt: the folder of the attempt whose answer is kept. predicted_bytes:
    the model states of one rank according to the memory model; None without a prediction. predicted: the complete
    prediction. contents: hashes of the contents of its files at that time, by contents.of. anchor: the folder of the
    attempt of an earlier day, for a point that is measured once more because others of that day are kept. differs: what
    the kept answer was made with that a run of now would not be, by records.versions. own: the sweep has measured the
    kept answer itself, when the same command was typed before.
    """

    label: str
    overrides: tuple[str, ...]
    decision: RunState
    point: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    attempt: str = ""
    predicted_bytes: int | None = None
    predicted: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    anchor: str = ""
    differs: dict[str, dict[str, str]] = field(default_factory=dict)
    own: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "decision": self.decision.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Planned:
        known = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        return cls(**{**known, "decision": RunState(data["decision"]), "overrides": tuple(data["overrides"])})


@dataclass(frozen=True)
class Standing:
    """The current state of a point of a sweep.

    `attempt`: the attempt that runs or that has the answer. `result`: its result, present exactly if the state says
    that the point was measured.
    """

    planned: Planned
    state: RunState
    attempt: AttemptPaths | None = None
    message: str = ""
    slots: tuple[str, ...] = ()
    job: str = ""
    result: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        return self.planned.label


def open_sweep(output: str | Path, name: str, planned: Sequence[Planned], facts: Mapping[str, Any]) -> SweepPaths:
    """The folder of this sweep: the existing one with the same name and points, so that the same command resumes it,
    else a new one. The caller must be the `only_starter`. facts: `id` is the identity of a sweep that gets more points
    each time that it is opened."""
    for point in {entry.point for entry in planned if entry.point}:  # including points whose answers are kept
        clear_point(output, point)
    identity = facts.get("id") or sweep_id(name, planned)
    sweeps = Path(output).absolute() / "sweeps"
    sweeps.mkdir(parents=True, exist_ok=True)
    _clear_unrecorded(sweeps)
    for paths in all_sweeps(output):
        if is_sweep(paths, name, identity):
            clear_leftovers(paths.root)
            clear_leftovers(paths.pictures)
            make_room(paths.sweep, SWEEP)
            try:
                plan_of(paths)
            except BadRecord as bad:
                set_aside(paths.plan, bad.wrong)
            planned = _with_own(paths, planned, grows="id" in facts)
            # The events and requests of the last controller are over; the attempts record their outcome.
            for file in (paths.events, paths.requests, paths.controller, paths.claim):
                file.unlink(missing_ok=True)
            break
    else:
        paths = SweepPaths(_new_folder(sweeps, name))
    write_json_atomic(paths.sweep, {"schema": SCHEMA, "id": identity, "name": name, "time": time.time(), **facts})
    write_json_atomic(paths.plan, {"points": [point.to_dict() for point in planned]})
    return paths


def _with_own(paths: SweepPaths, planned: Sequence[Planned], *, grows: bool) -> Sequence[Planned]:
    """The plan, with the kept answers that this sweep has measured as its own. If points are left to run there are
    none, unless it grows: what was measured before stands beside what is measured in another session."""
    if not grows and any(point.decision is RunState.queued for point in planned):
        return planned
    try:
        before = [one for one in standings(paths) if one.state is not RunState.cached or one.planned.own]
    except (BadRecord, OSError):
        return planned
    made = {one.label: (str(one.attempt.root), one.state) for one in before if one.attempt is not None}
    owned = []
    for point in planned:
        attempt, state = made.get(point.label, ("", point.decision))
        own = point.decision is RunState.cached and attempt == point.attempt
        if own and not point.differs:  # its rows are no other sweep's, so nothing is to be said beside each
            # A sweep that grows does not reuse them either.
            point = replace(point, reason="", decision=state if grows else point.decision)
        owned.append(replace(point, own=own))
    return owned


def _clear_unrecorded(sweeps: Path) -> None:
    """Removes the folders of sweeps whose command was killed before it had recorded anything."""
    for sweep in map(SweepPaths, sweeps.iterdir()):
        if sweep.root.is_dir() and not os.path.lexists(sweep.sweep):
            clear_leftovers(sweep.root)
            with contextlib.suppress(OSError):  # a folder with other files stays
                sweep.root.rmdir()


def is_sweep(sweep: SweepPaths, name: str, identity: str) -> bool:
    """Whether the folder belongs to the sweep of this name and identity. Decided by the plan if sweep.json is bad."""
    facts = read_or_warn(sweep.sweep, SWEEP)
    if facts is not None:
        return bool(facts["id"] == identity)
    try:
        return sweep_id(name, plan_of(sweep)) == identity
    except (BadRecord, OSError):
        return False


def sweep_id(name: str, planned: Sequence[Planned]) -> str:
    """The identity of a sweep: the same for the same name and points in the same order, wherever they run."""
    text = json.dumps([name, [[point.label, point.point or list(point.overrides)] for point in planned]])
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _new_folder(sweeps: Path, name: str) -> Path:
    safe = "".join(char if char.isalnum() or char in "-_." else "-" for char in name) or "sweep"
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while True:
        folder = sweeps / (f"{stamp}_{safe}" + (f"_{number}" if number > 1 else ""))
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            number += 1


def all_sweeps(output: str | Path) -> list[SweepPaths]:
    """All sweeps of an output folder, newest first."""
    try:
        folders = list((Path(output).absolute() / "sweeps").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    dated = [(made, sweep) for sweep in map(SweepPaths, folders) if (made := _made(sweep)) is not None]
    return [sweep for _, sweep in sorted(dated, key=lambda pair: pair[0], reverse=True)]


def _made(sweep: SweepPaths) -> float | None:
    """When the record of the sweep was written; None for a folder without one, or one that may not be opened."""
    try:
        return sweep.sweep.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn_once(str(error))
        return None


PLAN = {"points": [POINT]}


def plan_of(sweep: SweepPaths) -> list[Planned]:
    """The points of a sweep. BadRecord if the plan is missing or cannot be read."""
    plan = require_json(sweep.plan, PLAN)
    return [Planned.from_dict(point) for point in plan["points"]]


def standings(sweep: SweepPaths) -> list[Standing]:
    """The state of every point, from the plan, the controller's events and the attempts themselves.

    BadRecord if there is no plan. A point whose own records cannot be read is `lost`, and its message says why.
    """
    latest: dict[str, dict[str, Any]] = {}
    for event in EventTail(sweep.events, SWEEP_EVENTS).read_new():
        if event["event"] in SWEEP_EVENTS.shapes and "label" in event:
            latest[event["label"]] = event
    return [_standing(sweep, point, latest.get(point.label)) for point in plan_of(sweep)]


def _attempt(sweep: SweepPaths, recorded: str) -> AttemptPaths:
    """The folder of an attempt: in a copy of the outputs, such as from a cluster, that of the copy."""
    own = sweep.output.joinpath(*Path(recorded).parts[-4:])  # points/ID/attempts/NUMBER
    return AttemptPaths(own if own.is_dir() else Path(recorded))


def _standing(sweep: SweepPaths, planned: Planned, event: Mapping[str, Any] | None) -> Standing:
    if event is not None and event["event"] == "decided":
        return Standing(planned, RunState(event["state"]), message=event["reason"])
    if event is None or planned.decision is not RunState.queued:
        kept = _attempt(sweep, planned.attempt) if planned.attempt else None
        return _with_result(Standing(planned, planned.decision, kept, planned.reason))
    attempt = _attempt(sweep, event["attempt"])
    standing = Standing(planned, RunState.lost, attempt, "", tuple(event["slots"]), event.get("job") or "")
    try:
        current = settled(attempt)
    except (BadRecord, OSError) as error:
        return replace(standing, message=str(error))
    return _with_result(replace(standing, state=current.state, message=current.message))


def _with_result(standing: Standing) -> Standing:
    if standing.attempt is None or not standing.state.measured:
        return standing
    try:
        return replace(standing, result=result_of(standing.attempt))
    except (BadRecord, OSError) as error:
        return replace(standing, state=RunState.lost, message=str(error))


def tell(sweep: SweepPaths, event: str, **facts: object) -> None:
    """Records an event of the controller."""
    append_event(sweep.events, {"event": event, "time": time.time(), **facts})


def ask(sweep: SweepPaths, what: str, **facts: object) -> None:
    """Sends a request to the controller, which checks for requests several times a second."""
    append_event(sweep.requests, {"do": what, "time": time.time(), **facts})


def controller_pid(sweep: SweepPaths) -> int | None:
    """The pid of the process that controls the sweep; None if it does not run."""
    processes = filter(None, (read_or_warn(path, CONTROLLER) for path in (sweep.controller, sweep.claim)))
    return next((int(who["pid"]) for who in processes if is_alive(who["pid"], who["started"])), None)


def still_runs(sweep: SweepPaths, standings: Sequence[Standing]) -> bool:
    """Whether the sweep can still make progress without a new command."""
    if is_on_cluster(sweep):
        return not all(point.state.final for point in standings)
    return controller_pid(sweep) is not None


def is_on_cluster(sweep: SweepPaths) -> bool:
    """Whether the sweep's points were sent to a scheduler."""
    facts = read_or_warn(sweep.sweep, SWEEP)
    if facts is not None:
        return bool(facts.get("on_cluster"))
    # The sweep's own record is unreadable; a sweep that was sent has jobs in its events.
    return any(event.get("job") for event in EventTail(sweep.events, SWEEP_EVENTS).read_new())


def only_starter(output: str | Path) -> AbstractContextManager[bool]:
    """A lock for starting a sweep of this output, so that the second of two commands sees the sweep of the first.

    Blocks while another command holds it.
    """
    sweeps = Path(output).absolute() / "sweeps"
    sweeps.mkdir(parents=True, exist_ok=True)
    return locked(sweeps / ".lock")


def only_controller(sweep: SweepPaths, *, wait: bool = False) -> AbstractContextManager[bool]:
    """A lock for controlling the sweep. If another process holds it: blocks with `wait`, else yields False."""
    return locked(sweep.root / ".lock", wait=wait)
