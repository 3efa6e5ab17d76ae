"""The records of a run on disk: the only speller of file names, and a run's identity."""

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
    clear_leftovers,
    make_room,
    read_or_warn,
    require_json,
    warn_once,
    write_json_atomic,
)
from orchestrator.records.record_shapes import PROCESS, RESULT, STATE, misfit
from orchestrator.records.run_state import MOVES, RunState

SCHEMA = 1
# What may differ between two runs that measure the same thing.
IGNORED_KEYS = (
    "output",
    "tracking",
    "cluster",
    "resources.time_limit_min",
    "resources.stuck_s",
    "checkpoint.resume",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
)


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt at one point."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def provenance(self) -> Path:
        """Which code, packages and settings made it."""
        return self.root / "provenance.json"

    @property
    def diff(self) -> Path:
        """What the code's checkout had that no commit has."""
        return self.root / "git.diff"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def rendezvous(self) -> Path:
        return self.root / "rendezvous"

    @property
    def exits(self) -> Path:
        """Exit code and time of each rank's process, written by the controller."""
        return self.root / "exits.json"

    @property
    def job(self) -> Path:
        """The scheduler's id of the job that this attempt was sent out as, its script and its log."""
        return self.root / "job.json"

    @property
    def heartbeat(self) -> Path:
        """Written every few seconds by rank 0 of an attempt whose processes the command cannot see."""
        return self.root / "heartbeat.json"

    @property
    def denied(self) -> Path:
        """For how long the scheduler has denied the job while its heartbeat stood still; gone when it knows it."""
        return self.root / "denied.json"

    @property
    def failing(self) -> Path:
        """For how long the first error of a cluster's attempt has been seen."""
        return self.root / "failing.json"

    @property
    def checkpoints(self) -> Path:
        """What the attempts at one point save and go on from."""
        return self.root.parent.parent / "checkpoints"

    @property
    def weights(self) -> Path:
        """The trained weights as a Hugging Face folder."""
        return self.root / "weights"

    @property
    def submitit(self) -> Path:
        return self.root / "submitit"

    @property
    def controller_log(self) -> Path:
        return self.submitit / "controller.log"

    def rank_log(self, rank: int) -> Path:
        return self.root / f"rank{rank}.log"

    def rank_record(self, rank: int) -> Path:
        return self.root / f"rank{rank}.json"


def store_path(output: str | Path) -> Path:
    """The SQLite file of the tracking store that lies beside the outputs."""
    return Path(output) / "mlflow.db"


def artifacts_path(output: str | Path) -> Path:
    return Path(output) / "artifacts"


def tracking_path(output: str | Path) -> Path:
    """A file for each run that the tracking store does not have completely."""
    return Path(output) / "tracking"


def tracker_log_path(output: str | Path) -> Path:
    return Path(output) / "tracker.log"


def scratch_path(output: str | Path) -> Path:
    """Where scratch files lie when no offload.folder is given. It is ours to make; any other folder is the user's."""
    return Path(output) / "scratch"


def make_output(output: str | Path) -> None:
    """The folder, made where it is missing. OSError where it cannot be made or written to."""
    folder = Path(output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written to", str(folder))


def joins_path(output: str | Path) -> Path:
    """Where ranks that another launcher started tell each other the attempt's folder."""
    return Path(output) / "joins"


def without_ignored(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration less IGNORED_KEYS."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if prefix + key not in IGNORED_KEYS:
            kept[key] = without_ignored(value, f"{prefix}{key}.") if isinstance(value, dict) else value
    return kept


def identity(config: Mapping[str, Any], world: int, hardware: str) -> dict[str, Any]:
    """What makes two runs the same measurement: everything here, and nothing else."""
    return {"schema": SCHEMA, "world": world, "hardware": hardware, "config": without_ignored(config)}


def point_id(config: Mapping[str, Any], world: int, hardware: str, held: Mapping[str, str] | None = None) -> str:
    """The same for the same measurement, whatever the order of the keys: ten hexadecimal digits of the configuration,
    and of a point that reads files a dash and ten digits of what they hold (`held`, by contents.of).

    The first ten name the point's folder. So checkpoints stay with the configuration when its files change, and a run
    that would go on from them is refused by the hash of the data.
    """
    digits = _ten_digits(identity(config, world, hardware))
    return f"{digits}-{_ten_digits(held)}" if held else digits


def _ten_digits(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _point_folder(output: str | Path, point: str) -> Path:
    return Path(output).absolute() / "points" / point.partition("-")[0]


class Attempt:
    """One try at a point, whose state only its owner moves. The command's process owns it, ranks never do."""

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
        """An attempt whose owner is gone, or is a scheduler: whoever calls this is its owner now. BadRecord where its
        state cannot be read."""
        facts = require_json(paths.state, STATE)
        state, label, point = RunState(facts.pop("state")), str(facts.pop("label")), str(facts.pop("point"))
        facts.pop("time")
        return cls(paths, point, label, state, facts)

    @property
    def message(self) -> str:
        """Why it stands as it does; empty where there is nothing to say."""
        return str(self._facts.get("message") or "")

    @property
    def owner_is_gone(self) -> bool:
        """Whether the process that moves this attempt ran on this machine and has ended."""
        owner = self._facts.get("owner")
        if not isinstance(owner, dict) or owner.get("host") != socket.gethostname() or misfit(owner, PROCESS):
            return False
        return not is_alive(owner["pid"], owner["started"])

    def move(self, state: RunState, **facts: object) -> None:
        """Goes to `state` and writes it, with all `facts` so far beside it. An illegal move is our mistake."""
        assert state in MOVES[self.state], f"{self.paths.root}: no way from {self.state.value} to {state.value}"
        self.state = state
        self._facts |= facts
        self.write()

    def write(self) -> None:
        """Puts down how it stands."""
        state = {"state": self.state.value, "time": time.time(), "label": self.label, "point": self.point}
        write_json_atomic(self.paths.state, {**state, **self._facts})


def this_process() -> dict[str, object]:
    """Who this is, for records: see processes.is_alive."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": started(os.getpid())}


def settle(paths: AttemptPaths) -> RunState:
    """How the attempt stands; see `settled`."""
    return settled(paths).state


def settled(paths: AttemptPaths) -> Attempt:
    """The attempt as it stands. One whose owner died in the middle becomes `lost`, or what its result says.

    BadRecord where its state cannot be read. Where it cannot be written, as for another user, it is told all the same.
    """
    attempt = Attempt.reopen(paths)
    if attempt.state.final or not attempt.owner_is_gone:
        return attempt
    state, facts = RunState.lost, {"message": "the command that watched it is gone"}
    if attempt.state is not RunState.queued and paths.result.exists():
        try:
            result_of(paths)
            state, facts = RunState.ok, {"note": "the command that watched it was gone when it ended"}
        except BadRecord as bad:
            facts = {"message": str(bad)}
    with contextlib.suppress(OSError):
        attempt.move(state, **facts)
    return attempt


def result_of(attempt: AttemptPaths) -> dict[str, Any]:
    """What was measured. BadRecord where there is no result, or one that cannot be believed."""
    return require_json(attempt.result, RESULT)


def is_answer(attempt: AttemptPaths) -> bool:
    """Whether the result can be believed; one that cannot is told once."""
    try:
        result_of(attempt)
    except (BadRecord, OSError) as error:
        warn_once(str(error))
        return False
    return True


def attempts_at(output: str | Path, point: str) -> list[AttemptPaths]:
    """The attempts at a point whose state can be read, the newest first."""
    return [one for one in all_attempts(output, point) if _point_of(one) == point]


def _point_of(attempt: AttemptPaths) -> str | None:
    return (read_or_warn(attempt.state, STATE) or {}).get("point")


def all_attempts(output: str | Path, point: str) -> list[AttemptPaths]:
    """The attempts at a point whatever its files held then, the newest first."""
    folder = _point_folder(output, point) / "attempts"
    found = [one for one in folder.iterdir() if one.name.isdigit()] if folder.is_dir() else []
    return [AttemptPaths(one) for one in sorted(found, key=lambda one: -int(one.name)) if (one / "state.json").exists()]


def clear_point(output: str | Path, point: str) -> None:
    """Removes what processes that have ended began to write at a point and could not finish."""
    folder = _point_folder(output, point)
    for place in (folder, *folder.glob("attempts/*")):
        clear_leftovers(place)


def new_attempt(
    output: str | Path,
    config: Mapping[str, Any],
    label: str,
    hardware: str,
    owner: Mapping[str, object] | None = None,
) -> Attempt:
    """A folder of its own under the point's, with the resolved configuration in it; state queued.

    `owner`: who moves it; this process, unless a scheduler has it.
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
    for one in all_attempts(output, point):
        make_room(one.state, STATE)
        make_room(one.result, RESULT)
        with contextlib.suppress(BadRecord, OSError):
            settle(one)  # a run whose command was killed is looked at by nobody else
    paths = AttemptPaths(_next_folder(folder / "attempts"))
    write_json_atomic(paths.config, config)
    write_json_atomic(paths.provenance, provenance.facts())
    if diff := provenance.code().diff:
        paths.diff.write_text(diff + "\n", encoding="utf-8")
    attempt = Attempt(paths, point, label, facts={"owner": owner or this_process(), "contents": held})
    attempt.write()
    return attempt


def _next_folder(attempts: Path) -> Path:
    attempts.mkdir(exist_ok=True)
    number = 1 + max((int(one.name) for one in attempts.iterdir() if one.name.isdigit()), default=0)
    while True:
        folder = attempts / f"{number:02d}"
        try:
            folder.mkdir()  # exclusive: two commands at the same moment get two numbers
            return folder
        except FileExistsError:
            number += 1
