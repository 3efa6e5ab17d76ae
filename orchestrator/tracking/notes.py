"""Notes of the runs that MLflow does not have completely: one file per run in the output folder, from the run's start
until the tracker has written its end. The next command completes runs that a dead tracker or command left here."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.machine.processes import is_alive
from orchestrator.records.record_file import clear_leftovers, read_or_warn, write_json_atomic
from orchestrator.records.record_shapes import NOTE
from orchestrator.records.run_record import this_process, tracking_path

TRIES = 3  # attempts to complete a run; then it is given up


def note(output: Path, message: Mapping[str, Any]) -> None:
    """Notes that this process begins the run of the message. OSError if the note cannot be written."""
    tracking_path(output).mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json_atomic(_path(output, message["attempt"]), {**message, "command": this_process(), "tries": 0})


def is_noted(output: Path, attempt: str) -> bool:
    """Whether MLflow does not yet have the complete run of the attempt."""
    return _path(output, attempt).exists()


def forget(output: Path, attempt: str) -> None:
    """Removes the note: MLflow has the complete run."""
    with suppress(OSError):
        _path(output, attempt).unlink()


def left_behind(output: Path, *, tries: int | None = TRIES) -> list[dict[str, Any]]:
    """The messages of the runs whose commands on this machine have ended, and that were tried fewer times."""
    folder = tracking_path(output)
    if not folder.is_dir():
        return []
    clear_leftovers(folder)
    messages = filter(None, (read_or_warn(path, NOTE) for path in sorted(folder.glob("*.json"))))
    return [
        message for message in messages if _is_left(message["command"]) and (tries is None or message["tries"] < tries)
    ]


def count_try(output: Path, message: Mapping[str, Any]) -> None:
    """Records one more try to complete the run, before the try is made."""
    write_json_atomic(_path(output, message["attempt"]), {**message, "tries": message["tries"] + 1})


def _is_left(command: Mapping[str, Any]) -> bool:
    return command["host"] == socket.gethostname() and not is_alive(command["pid"], command["started"])


def _path(output: Path, attempt: str) -> Path:
    return tracking_path(output) / f"{hashlib.sha256(attempt.encode()).hexdigest()[:16]}.json"
