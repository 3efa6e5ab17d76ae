"""The command's side of the tracker: starts it, and collects its warnings."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.config.schema import RunConfig, TrackingKind
from orchestrator.config.strict import Refusal
from orchestrator.machine import children
from orchestrator.records.run_record import AttemptPaths, store_path, tracker_log_path
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.tracking import left, names, schema_version

CLOSE_S = 30.0  # without an answer of the child; MLflow waits 20 s for a locked SQLite file
READY_S = 30.0
ADVICE = (
    "The runs continue and their records are kept; tracking=none turns MLflow off, tracking.uri=... chooses another "
    "store, and the verb sync writes what is missing"
)
# A server that is down must not hold the tracker for the minutes that MLflow takes by default: it tries again later.
HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}


def store_uri(config: RunConfig, output: Path, environ: Mapping[str, str]) -> str:
    """The store of the runs: tracking.uri, else MLFLOW_TRACKING_URI, else an SQLite file next to the outputs."""
    return config.tracking.uri or environ.get("MLFLOW_TRACKING_URI") or names.local_uri(output)


def check_store(config: RunConfig, output: Path) -> None:
    """Raises Refusal, before anything starts, if the store of these runs is a database of another version."""
    if config.tracking.kind is TrackingKind.none:
        return
    if problem := schema_version.problem(store_uri(config, output, os.environ)):
        raise Refusal([problem])


class Tracker:
    """The process that writes a run, or a sweep, to MLflow from its records. Its failures never raise here; they are
    returned as warnings."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None, *, makes_store: bool = False) -> None:
        """Without a process, the tracker does nothing."""
        self._process = process
        self._unended = b""
        self._ready = process is None or not makes_store
        self._warnings: list[str] = []

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def wait_for_store(self) -> None:
        """Returns when a new store has been created. An existing store is not waited for: it is opened while the ranks
        start, and only the tracker writes to it."""
        deadline = time.monotonic() + READY_S
        while not self._ready and self._process is not None:
            self._listen(0.1)
            self._notice_end()
            if time.monotonic() > deadline:
                self._warn(f"its store did not exist after {READY_S:g} s")
                break
        self._ready = True

    def warnings(self) -> list[str]:
        """Problems since the last call, as text for the screen. Never blocks."""
        self._listen(0)
        self._notice_end()
        new, self._warnings = self._warnings, []
        return new

    def close(self) -> None:
        """Returns when everything has been written, or when the process has done nothing for CLOSE_S."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        deadline = time.monotonic() + CLOSE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._listen(0.05):
                deadline = time.monotonic() + CLOSE_S
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self._warn(f"it was not done after {CLOSE_S:g} s and was stopped")
        self._listen(0)
        self._notice_end()
        self._process = None

    def _notice_end(self) -> None:
        """Warns if the process has died; the next command, or sync, writes what is missing."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return
        self._process = None
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._warn(f"its process {how}; the next command completes what is missing")

    def _listen(self, wait_s: float) -> bool:
        """Takes the child's answers. Whether there were any."""
        if self._process is None or self._process.stdout is None:
            return False
        readable, _, _ = select.select([self._process.stdout], [], [], wait_s)
        if not readable:
            return False
        chunk = os.read(self._process.stdout.fileno(), 65536)
        if not chunk:
            time.sleep(wait_s)  # a closed pipe is always readable
        *lines, self._unended = (self._unended + chunk).split(b"\n")
        for line in lines:
            self._take(line)
        return bool(chunk)

    def _take(self, line: bytes) -> None:
        try:
            answer = json.loads(line)
        except ValueError:
            return
        if not isinstance(answer, dict):  # printed by some library
            return
        self._ready = self._ready or "ready" in answer
        if "warning" in answer:
            self._warn(answer["warning"])

    def _warn(self, what: str) -> None:
        self._warnings.append(f"MLflow: {what}. {ADVICE}")


def start_tracker(config: RunConfig, output: Path, of: SweepPaths | AttemptPaths) -> Tracker:
    """Starts the tracker of a sweep or of a single run; with tracking=none, a tracker without a process.

    Its slow import and the creation of a new store run while the command continues.
    """
    if config.tracking.kind is TrackingKind.none:
        return Tracker()
    uri = store_uri(config, output, os.environ)
    # Checked before the child process can create it.
    makes_store = uri == names.local_uri(output) and not store_path(output).exists()
    left.note(output, of.root)
    what = "--sweep" if isinstance(of, SweepPaths) else "--attempt"
    words = ["follow", "--uri", uri, f"{what}={of.root}", str(output)]
    return Tracker(_start_child(words, output, subprocess.PIPE), makes_store=makes_store)


def complete_left_behind(output: Path) -> subprocess.Popen[bytes] | None:
    """Starts a process that completes what trackers of dead commands left, and does not wait for it. None if they left
    nothing. The check is cheap, so every command makes it."""
    if not left.behind(output):
        return None
    return _start_child(["complete", str(output)], output, subprocess.DEVNULL)


def start_sync(
    output: Path, sweeps: Sequence[SweepPaths] = (), uri: str = "", *, heard: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a process that writes what the stores lack of these sweeps, or of the whole output folder, and does not
    wait for it. `heard`: its answers can be read from its stdout, one JSON object in a line."""
    words = ["sync", *(["--uri", uri] if uri else []), *(f"--sweep={sweep.root}" for sweep in sweeps), str(output)]
    return _start_child(words, output, subprocess.PIPE if heard else subprocess.DEVNULL)


def _start_child(words: list[str], output: Path, stream: int) -> subprocess.Popen[bytes]:
    """`stream`: used for both stdin and stdout of the child."""
    own = {**mlflow_environment(output), "OMP_NUM_THREADS": "1"}
    command = children.words("orchestrator.tracking.process", *words)
    return children.start(command, {**HTTP, **os.environ, **own}, tracker_log_path(output), stream=stream)


def mlflow_environment(output: Path) -> dict[str, str]:
    """What every process with MLflow gets: no telemetry, and a home, without which it cannot be imported.

    The output folder is the home of a user who has none: MLflow reads settings there and writes nothing.
    """
    home = {} if os.path.isabs(os.path.expanduser("~")) else {"HOME": str(output.absolute())}
    return {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", **home}
