"""The command's end of the tracker: starts it, tells it what begins and ends, and hears its warnings."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator import start
from orchestrator import tracking_names as names
from orchestrator.record import Attempt, store_path, tracker_log_path
from orchestrator.schema import RunConfig, TrackingKind

CLOSE_S = 30.0  # MLflow waits 20 s for a locked SQLite file
READY_S = 30.0
ADVICE = (
    "The runs go on and their records stay; tracking=none leaves MLflow out, tracking.uri=... chooses another store"
)


def store_uri(config: RunConfig, output: Path, environ: Mapping[str, str]) -> str:
    """Where runs go: tracking.uri, else MLFLOW_TRACKING_URI, else an SQLite file beside the outputs."""
    return config.tracking.uri or environ.get("MLFLOW_TRACKING_URI") or names.local_uri(output)


def experiment_name(config: RunConfig) -> str:
    return config.tracking.experiment or f"zlab/{config.model.name}"


class Tracker:
    """Follows runs from a child process. No method raises for what the child does; trouble comes as warnings."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None, *, makes_store: bool = False) -> None:
        self._process = process
        self._heard = b""
        self._ready = process is None or not makes_store
        self._warnings: list[str] = []

    def open(self, experiment: str) -> None:
        self._send({"do": "open", "experiment": experiment})

    def wait_for_store(self) -> None:
        """A store that has to be made is there when this returns. One that was there is not waited for:
        it is opened while the ranks start, and only the tracker writes to it."""
        deadline = time.monotonic() + READY_S
        while not self._ready and time.monotonic() < deadline and self._running():
            self._listen(0.1)
        if not self._ready:
            self._warn(f"its store was not there after {READY_S:g} s")
            self._ready = True

    def begin(self, attempt: Attempt, experiment: str, sweep: str) -> None:
        message = {"do": "begin", "attempt": str(attempt.paths.root), "label": attempt.label}
        self._send({**message, "point": attempt.point, "experiment": experiment, "sweep": sweep})

    def end(self, attempt: Attempt) -> None:
        """The attempt's state is final and written."""
        self._send({"do": "end", "attempt": str(attempt.paths.root)})

    def summary(self, experiment: str, sweep: str, table: str, files: list[str]) -> None:
        self._send({"do": "summary", "experiment": experiment, "sweep": sweep, "table": table, "files": files})

    def warnings(self) -> list[str]:
        """What went wrong since the last call, in words for the screen. Never blocks."""
        self._listen(0)
        found, self._warnings = self._warnings, []
        return found

    def close(self) -> None:
        """Returns when everything is written, or given up after CLOSE_S."""
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        deadline = time.monotonic() + CLOSE_S
        while self._running() and time.monotonic() < deadline:
            self._listen(0.05)
        if self._running():
            process.kill()
            self._warn(f"it was not done after {CLOSE_S:g} s and was stopped")
        process.wait()
        self._listen(0)
        if process.returncode > 0:
            self._warn(f"its process ended with exit code {process.returncode}")
        self._process = None

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._warn("its process is gone")
            self._process = None

    def _listen(self, wait_s: float) -> None:
        if self._process is None or self._process.stdout is None:
            return
        readable, _, _ = select.select([self._process.stdout], [], [], wait_s)
        if not readable:
            return
        chunk = os.read(self._process.stdout.fileno(), 65536)
        if not chunk:
            time.sleep(wait_s)  # at its end the pipe is always readable
        *lines, self._heard = (self._heard + chunk).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, answer: Mapping[str, Any]) -> None:
        self._ready = self._ready or "ready" in answer
        if "warning" in answer:
            self._warn(answer["warning"])

    def _warn(self, what: str) -> None:
        self._warnings.append(f"MLflow: {what}. {ADVICE}")


def start_tracker(config: RunConfig, output: Path) -> Tracker:
    """A tracker for this command; one without a process where tracking=none.

    Its slow import and the making of a new store go on while the command does other things.
    """
    if config.tracking.kind is TrackingKind.none:
        return Tracker()
    uri = store_uri(config, output, os.environ)
    output.mkdir(parents=True, exist_ok=True)
    # Asked before the child can make it.
    makes_store = uri == names.local_uri(output) and not store_path(output).exists()
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "OMP_NUM_THREADS": "1"}
    with tracker_log_path(output).open("ab") as log:
        process = subprocess.Popen(
            start.words("orchestrator.tracking", "follow", "--uri", uri, str(output)),
            env=start.environment({**os.environ, **quiet}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    tracker = Tracker(process, makes_store=makes_store)
    tracker.open(experiment_name(config))
    return tracker
