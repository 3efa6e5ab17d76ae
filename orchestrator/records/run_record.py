"""The records of a run on disk: the names of its files, which are spelled only here, its identity and its state."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.machine import provenance
from orchestrator.machine.processes import is_alive, started
from orchestrator.records import contents
from orchestrator.records.record_file import (
    BadRecord,
    FileIn,
    clear_leftovers,
    make_room,
    read_or_warn,
    require_json,
    warn_once,
    write_json_atomic,
)
from orchestrator.records.record_shapes import PROCESS, RANK, RESULT, STATE, misfit
from orchestrator.records.run_state import MOVES, RunState

SCHEMA = 1
# Settings that may differ between two runs of the same measurement.
IGNORED_KEYS = (
    "output",
    "tracking",
    "cluster",
    "hardware",  # of a plan; the hardware of a measurement is its name, in `identity`
    "resources.time_limit_min",
    "resources.stuck_s",
    "resources.memory_mib",
    "measure.reference",
    "checkpoint.resume",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "checkpoint.node_folder",
)


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt at a point."""

    root: Path

    config = FileIn("config.json")
    state = FileIn("state.json")
    provenance = FileIn("provenance.json")  # the code, packages and settings that produced the attempt
    diff = FileIn("git.diff")  # the uncommitted changes in the checkout of the code
    metrics = FileIn("metrics.jsonl")
    result = FileIn("result.json")
    profile = FileIn("profile.json")  # where time and memory of a step went, of the rank with the highest peak
    traces = FileIn("traces")  # the profiled step of each rank, for a trace viewer
    turns = FileIn("turns.json")  # the turns that the controller gives to the ranks, if points are measured in rounds
    rendezvous = FileIn("rendezvous")
    exits = FileIn("exits.json")  # exit code and time of each rank's process, written by the controller
    job = FileIn("job.json")  # the scheduler's id of the job that runs this attempt, with its script and its log
    # Written every few seconds by rank 0 if the command cannot see the attempt's processes.
    heartbeat = FileIn("heartbeat.json")
    # Since when the scheduler has not known the job while its heartbeat has not changed; removed once it does.
    denied = FileIn("denied.json")
    failing = FileIn("failing.json")  # since when the first error of an attempt on a cluster has been seen
    weights = FileIn("weights")  # the trained weights as a Hugging Face folder
    submitit = FileIn("submitit")
    controller_log = FileIn("submitit/controller.log")

    @property
    def checkpoints(self) -> Path:
        """The checkpoints that all attempts at the point save and resume from."""
        return self.root.parent.parent / "checkpoints"

    def rank_log(self, rank: int) -> Path:
        return self.root / f"rank{rank}.log"

    def rank_record(self, rank: int) -> Path:
        return self.root / f"rank{rank}.json"


def store_path(output: str | Path) -> Path:
    """The SQLite file of the default tracking store, next to the outputs."""
    return Path(output) / "mlflow.db"


def artifacts_path(output: str | Path) -> Path:
    return Path(output) / "artifacts"


def tracking_path(output: str | Path) -> Path:
    """The folder with a file for each run that is not yet complete in the tracking store."""
    return Path(output) / "tracking"


def tracker_log_path(output: str | Path) -> Path:
    return Path(output) / "tracker.log"


def scratch_path(output: str | Path) -> Path:
    """The folder for scratch files if offload.folder is not set. We create this one; any other belongs to the user."""
    return Path(output) / "scratch"


def make_output(output: str | Path) -> None:
    """Creates the output folder if it is missing. OSError if it cannot be created or written to."""
    folder = Path(output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written to", str(folder))


def joins_path(output: str | Path) -> Path:
    """The folder where ranks that were started by another launcher exchange the attempt's folder."""
    return Path(output) / "joins"


def without_ignored(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without IGNORED_KEYS."""
    kept = {name: values for name, values in config.items() if name not in IGNORED_KEYS}
    for name, values in kept.items():
        if isinstance(values, Mapping):
            kept[name] = {key: value for key, value in values.items() if f"{name}.{key}" not in IGNORED_KEYS}
    return kept


def identity(config: Mapping[str, Any], world: int, hardware: str) -> dict[str, Any]:
    """The identity of a measurement, without the contents of its files: equal for two runs that measure the same."""
    return {"schema": SCHEMA, "world": world, "hardware": hardware, "config": without_ignored(config)}


def point_id(config: Mapping[str, Any], world: int, hardware: str, held: Mapping[str, str] | None = None) -> str:
    """The id of a point, which is equal for equal measurements, whatever the order of the keys.

    It is ten hexadecimal digits of a hash of `identity`. If the point reads files, a dash and ten digits of a hash of
    their contents follow (`held`, by contents.of). The first ten digits name the point's folder. So when the files
    change, the checkpoints stay with the configuration, and a run that would resume from them is refused by the hash of
    the data.
    """
    digits = _ten_digits(identity(config, world, hardware))
    return f"{digits}-{_ten_digits(held)}" if held else digits


def _ten_digits(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _point_folder(output: str | Path, point: str) -> Path:
    return Path(output).absolute() / "points" / point.partition("-")[0]


class Attempt:
    """One attempt at a point. Only its owner changes its state: the process of the command, never a rank."""

    def __init__(
        self,
        paths: AttemptPaths,
        point: str,
        label: str,
        state: RunState = RunState.queued,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self.paths = paths
        self.point = point
        self.label = label
        self.state = state
        self._facts: dict[str, object] = dict(facts or {})

    @classmethod
    def reopen(cls, paths: AttemptPaths) -> Attempt:
        """Opens an attempt whose owner has ended or is a scheduler; the caller is its new owner.

        BadRecord if its state cannot be read.
        """
        facts = require_json(paths.state, STATE)
        state, label, point = RunState(facts.pop("state")), str(facts.pop("label")), str(facts.pop("point"))
        facts.pop("time")
        return cls(paths, point, label, state, facts)

    @property
    def message(self) -> str:
        """The reason for the state; empty if there is none."""
        return str(self._facts.get("message") or "")

    @property
    def facts(self) -> Mapping[str, object]:
        """What is recorded about the state."""
        return self._facts

    @property
    def owner_is_gone(self) -> bool:
        """Whether the process that owns this attempt ran on this machine and has ended."""
        owner = self._facts.get("owner")
        if not isinstance(owner, dict) or owner.get("host") != socket.gethostname() or misfit(owner, PROCESS):
            return False
        return not is_alive(owner["pid"], owner["started"])

    @property
    def has_living_ranks(self) -> bool:
        """Whether a rank runs on this machine. Ranks end with their owner, but not at the same moment."""
        records = [read_or_warn(path, RANK) for path in self.paths.root.glob("rank*.json")]
        return any(is_alive(one["pid"], one["started"]) for one in records if one is not None)

    def move(self, state: RunState, **facts: object) -> None:
        """Changes the state and writes it, with `facts` and all earlier facts. The transition must be in MOVES."""
        assert state in MOVES[self.state], f"{self.paths.root}: no way from {self.state.value} to {state.value}"
        self.state = state
        self._facts |= facts
        self.write()

    def write(self) -> None:
        """Writes the state and the facts to state.json."""
        state = {"state": self.state.value, "time": time.time(), "label": self.label, "point": self.point}
        write_json_atomic(self.paths.state, {**state, **self._facts})


def this_process() -> dict[str, object]:
    """This process as records describe it, for processes.is_alive."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": started(os.getpid())}


def settle(paths: AttemptPaths) -> RunState:
    """The state of `settled`."""
    return settled(paths).state


def settled(paths: AttemptPaths) -> Attempt:
    """The attempt with its current state. If its owner died while it ran, it becomes `ok` if it has a valid result,
    else `lost`; not while a rank of it lives, which may be writing the result.

    BadRecord if its state cannot be read. A new state that cannot be written, as by another user, is returned anyway.
    """
    attempt = Attempt.reopen(paths)
    if attempt.state.final or not attempt.owner_is_gone or attempt.has_living_ranks:
        return attempt
    state, facts = RunState.lost, {"message": "the command that watched it has ended"}
    if attempt.state is not RunState.queued and paths.result.exists():
        try:
            result_of(paths)
            state, facts = RunState.ok, {"note": "the command that watched it ended before it"}
        except BadRecord as bad:
            facts = {"message": str(bad)}
    with contextlib.suppress(OSError):
        attempt.move(state, **facts)
    return attempt


def result_of(attempt: AttemptPaths) -> dict[str, Any]:
    """The result of an attempt. BadRecord if it is missing or damaged."""
    return require_json(attempt.result, RESULT)


def is_answer(attempt: AttemptPaths) -> bool:
    """Whether the attempt has a valid result; a damaged one is reported once."""
    try:
        result_of(attempt)
    except (BadRecord, OSError) as error:
        warn_once(str(error))
        return False
    return True


def attempts_at(output: str | Path, point: str) -> list[AttemptPaths]:
    """The attempts at a point whose state can be read, newest first."""
    return [attempt for attempt in all_attempts(output, point) if _point_of(attempt) == point]


def _point_of(attempt: AttemptPaths) -> str | None:
    return (read_or_warn(attempt.state, STATE) or {}).get("point")


def all_attempts(output: str | Path, point: str) -> list[AttemptPaths]:
    """The attempts at a point, whatever the contents of its files were at the time, newest first."""
    folder = _point_folder(output, point) / "attempts"
    numbered = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    attempts = [AttemptPaths(path) for path in sorted(numbered, key=lambda path: -int(path.name))]
    return [attempt for attempt in attempts if attempt.state.exists()]


def clear_point(output: str | Path, point: str) -> None:
    """Removes the temporary files of a point and its attempts whose writers have ended."""
    folder = _point_folder(output, point)
    for path in (folder, *folder.glob("attempts/*")):
        clear_leftovers(path)


def new_attempt(
    output: str | Path,
    config: Mapping[str, Any],
    label: str,
    hardware: str,
    owner: Mapping[str, object] | None = None,
) -> Attempt:
    """Creates a queued attempt, in a new folder in the point's, with the resolved configuration.

    `owner`: the process that owns it, if it is not this one but a scheduler.
    """
    world = int(config["resources"]["ranks"])
    held = contents.of(config)
    point = point_id(config, world, hardware, held)
    folder = _point_folder(output, point)
    folder.mkdir(parents=True, exist_ok=True)
    clear_point(output, point)
    write_json_atomic(folder / "config.json", config)
    hashed = {"point": folder.name, "ignored": IGNORED_KEYS, **identity(config, world, hardware)}
    write_json_atomic(folder / "identity.json", hashed)
    # Bad records of earlier attempts are set aside, and attempts whose command was killed get their final state.
    for earlier in all_attempts(output, point):
        make_room(earlier.state, STATE)
        make_room(earlier.result, RESULT)
        with contextlib.suppress(BadRecord, OSError):
            settle(earlier)  # nothing else updates the state of a run whose command was killed
    paths = AttemptPaths(_next_folder(folder / "attempts"))
    write_json_atomic(paths.config, config)
    other = config["resources"]["code"]
    write_json_atomic(paths.provenance, provenance.facts(other))
    if diff := provenance.code(other).diff:
        paths.diff.write_text(diff + "\n", encoding="utf-8")
    attempt = Attempt(paths, point, label, facts={"owner": owner or this_process(), "contents": held})
    attempt.write()
    return attempt


def _next_folder(attempts: Path) -> Path:
    attempts.mkdir(exist_ok=True)
    number = 1 + max((int(child.name) for child in attempts.iterdir() if child.name.isdigit()), default=0)
    while True:
        folder = attempts / f"{number:02d}"
        try:
            folder.mkdir()  # fails if it exists, so two commands at the same moment get two numbers
            return folder
        except FileExistsError:
            number += 1
