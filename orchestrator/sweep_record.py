"""The records of a sweep on disk: what was planned, what its controller did, and how each point stands now."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.processes import is_alive
from orchestrator.record import (
    SCHEMA,
    AttemptPaths,
    EventTail,
    append_event,
    clear_leftovers,
    read_json,
    settle,
    write_json_atomic,
)
from orchestrator.run_state import RunState

TAKEN = 75  # exit code of a controller that finds another one at its sweep; EX_TEMPFAIL of sysexits.h


@dataclass(frozen=True)
class SweepPaths:
    """The files of one sweep."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def sweep(self) -> Path:
        """What was typed, where, and the policies."""
        return self.root / "sweep.json"

    @property
    def plan(self) -> Path:
        """The points, and what was decided of each."""
        return self.root / "plan.json"

    @property
    def events(self) -> Path:
        """What the controller did."""
        return self.root / "events.jsonl"

    @property
    def requests(self) -> Path:
        """What other commands ask of the controller."""
        return self.root / "requests.jsonl"

    @property
    def controller(self) -> Path:
        """Who the controller is, by its own word."""
        return self.root / "controller.json"

    @property
    def claim(self) -> Path:
        """Who the controller will be, by the word of the command that started it a moment ago."""
        return self.root / "claim.json"

    @property
    def log(self) -> Path:
        return self.root / "controller.log"

    @property
    def report(self) -> Path:
        return self.root / "report.md"

    @property
    def results(self) -> Path:
        return self.root / "results.csv"

    @property
    def output(self) -> Path:
        return self.root.parent.parent


@dataclass(frozen=True)
class Planned:
    """A point of a sweep as it was decided: `decision` is queued (to run), or a state that needs no run.

    point: its id; empty where it was refused. attempt: the folder of the answer that is kept. predicted_bytes: of one
    rank, by the memory model, model states alone; None where nobody predicted. predicted: all of the prediction.
    contents: hashes of what its files held then, by contents.of.
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

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "decision": self.decision.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Planned:
        return cls(**{**data, "decision": RunState(data["decision"]), "overrides": tuple(data["overrides"])})


@dataclass(frozen=True)
class Standing:
    """How a point of a sweep stands now. `attempt`: the folder of what runs, or of the answer."""

    planned: Planned
    state: RunState
    attempt: AttemptPaths | None = None
    message: str = ""
    slots: tuple[str, ...] = ()
    job: str = ""

    @property
    def label(self) -> str:
        return self.planned.label

    def result(self) -> dict[str, Any] | None:
        return read_json(self.attempt.result) if self.attempt is not None and self.state.measured else None


def open_sweep(output: str | Path, name: str, planned: Sequence[Planned], facts: Mapping[str, Any]) -> SweepPaths:
    """The folder of this sweep: a new one, or that of the same name and points, so that the same command goes on."""
    identity = sweep_id(name, planned)
    sweeps = Path(output).absolute() / "sweeps"
    sweeps.mkdir(parents=True, exist_ok=True)
    for found in all_sweeps(output):
        if (read_json(found.sweep) or {}).get("id") == identity:
            paths = found
            clear_leftovers(paths.root)
            # What its last controller did and was asked is over; the attempts tell what came of it.
            for file in (paths.events, paths.requests, paths.controller, paths.claim):
                file.unlink(missing_ok=True)
            break
    else:
        paths = SweepPaths(_new_folder(sweeps, name))
    write_json_atomic(paths.sweep, {"schema": SCHEMA, "id": identity, "name": name, "time": time.time(), **facts})
    write_json_atomic(paths.plan, [one.to_dict() for one in planned])
    return paths


def sweep_id(name: str, planned: Sequence[Planned]) -> str:
    """The same for the same points in the same order, wherever they are sent to."""
    text = json.dumps([name, [[one.label, one.point or list(one.overrides)] for one in planned]])
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
    """Every sweep of an output folder, the newest first."""
    found = [
        SweepPaths(one) for one in (Path(output).absolute() / "sweeps").glob("*/") if (one / "sweep.json").exists()
    ]
    return sorted(found, key=lambda one: one.sweep.stat().st_mtime, reverse=True)


def plan_of(sweep: SweepPaths) -> list[Planned]:
    return [Planned.from_dict(one) for one in json.loads(sweep.plan.read_text(encoding="utf-8"))]


def standings(sweep: SweepPaths) -> list[Standing]:
    """How every point stands, from the plan, the controller's events and the attempts themselves."""
    told: dict[str, dict[str, Any]] = {}
    for event in EventTail(sweep.events).read_new():
        if "label" in event:
            told[event["label"]] = event
    return [_standing(one, told.get(one.label)) for one in plan_of(sweep)]


def _standing(planned: Planned, event: Mapping[str, Any] | None) -> Standing:
    if event is not None and event["event"] == "decided":
        return Standing(planned, RunState(event["state"]), message=event["reason"])
    if event is None or planned.decision is not RunState.queued:
        kept = AttemptPaths(Path(planned.attempt)) if planned.attempt else None
        return Standing(planned, planned.decision, kept, planned.reason)
    attempt = AttemptPaths(Path(event["attempt"]))
    state = settle(attempt)
    facts = read_json(attempt.state) or {}
    return Standing(planned, state, attempt, facts.get("message", ""), tuple(event["slots"]), event.get("job", ""))


def tell(sweep: SweepPaths, event: str, **facts: object) -> None:
    """The controller notes down what it did."""
    append_event(sweep.events, {"event": event, "time": time.time(), **facts})


def ask(sweep: SweepPaths, what: str, **facts: object) -> None:
    """Asks the controller for something; it looks several times a second."""
    append_event(sweep.requests, {"do": what, "time": time.time(), **facts})


def controller_pid(sweep: SweepPaths) -> int | None:
    """The process that runs the sweep, while it lives."""
    found = filter(None, map(read_json, (sweep.controller, sweep.claim)))
    return next((who["pid"] for who in found if is_alive(who["pid"], who["started"])), None)


@contextlib.contextmanager
def only_starter(output: str | Path) -> Iterator[None]:
    """Commands that start a sweep of this output do it one after the other, so that the second of two finds the sweep
    of the first. Blocks while another one is at it."""
    sweeps = Path(output).absolute() / "sweeps"
    sweeps.mkdir(parents=True, exist_ok=True)
    with (sweeps / ".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def only_controller(sweep: SweepPaths) -> Iterator[bool]:
    """False where another controller has this sweep."""
    with (sweep.root / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
