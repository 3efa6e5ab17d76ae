"""The command's side of the tracker: starts it, reports the start and end of runs, and collects its warnings."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig, TrackingKind
from orchestrator.config.strict import Refusal
from orchestrator.machine import children
from orchestrator.records.run_record import Attempt, store_path, tracker_log_path
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.tracking import names, schema_version
from orchestrator.tracking import notes as tracking_notes
from orchestrator.tracking.sweep_names import SweepNames, experiment_of

CLOSE_S = 30.0  # without an answer of the child; MLflow waits 20 s for a locked SQLite file
STARTS = 3  # restarts of a tracker that died during one command
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
    """Follows runs from a child process. The child's failures never raise here; they are returned as warnings.

    A child that dies is started again, up to STARTS times, and is sent the runs that it had not completed.
    """

    def __init__(
        self,
        output: Path | None = None,
        start: Callable[[], subprocess.Popen[bytes]] | None = None,
        *,
        makes_store: bool = False,
    ) -> None:
        """Without `start`, the tracker does nothing."""
        self._output, self._start = output or Path(), start
        self._process = start() if start is not None else None
        self._starts_left = STARTS
        self._unended = b""
        self._ready = self._process is None or not makes_store
        self._warnings: list[str] = []
        self._opened: dict[str, str] = {}
        self._begun: dict[str, dict[str, str]] = {}  # messages, by attempt
        self._ended: set[str] = set()
        self._sweeps: dict[str, SweepNames] = {}
        self._sweep: dict[str, Any] = {}
        self._summary: dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        """The child's process."""
        return None if self._process is None else self._process.pid

    def open(self, config: RunConfig, sweep: SweepPaths | None = None) -> None:
        """Opens the experiment of the run, or of the sweep with its page and the points that were kept."""
        names_ = self._names_of(sweep)
        experiment = experiment_of(config, None) if names_ is None else names_.experiment
        self._opened = {"do": "open", "experiment": experiment}
        self._send(self._opened)
        if sweep is not None:
            self._sweep = {"do": "sweep", "experiment": experiment, "sweep": str(sweep.root)}
            self._send(self._sweep)

    def wait_for_store(self) -> None:
        """Returns when a new store has been created. An existing store is not waited for: it is opened while the ranks
        start, and only the tracker writes to it."""
        deadline = time.monotonic() + READY_S
        while not self._ready and time.monotonic() < deadline and self._process is not None:
            self._listen(0.1)
            self._revive()
        if not self._ready and self._process is not None:
            self._warn(f"its store did not exist after {READY_S:g} s")
        self._ready = True

    def begin(self, attempt: Attempt, config: RunConfig, sweep: SweepPaths | None = None) -> None:
        """Starts tracking an attempt whose configuration is written: creates its run and logs metrics as they come."""
        if self._start is None:
            return
        message: dict[str, Any] = {"do": "begin", "attempt": str(attempt.paths.root), "label": attempt.label}
        message |= {"point": attempt.point, "experiment": experiment_of(config, None), "sweep": ""}
        if sweep is not None and (of_sweep := self._names_of(sweep)) is not None:
            message |= {"experiment": of_sweep.experiment, "sweep": sweep.name}
            message["varied"] = of_sweep.values_of(attempt.label)
        try:
            tracking_notes.note(self._output, message)
        except OSError as error:
            self._warn(f"{error}: a run that is cut off will not be completed in MLflow")
        self._begun[message["attempt"]] = message
        self._send(message)

    def _names_of(self, sweep: SweepPaths | None) -> SweepNames | None:
        if sweep is None or self._start is None:
            return None
        if sweep.name not in self._sweeps:
            self._sweeps[sweep.name] = SweepNames(sweep)
        return self._sweeps[sweep.name]

    def end(self, attempt: Attempt) -> None:
        """Ends the tracking of an attempt whose final state has been written. A no-op for one that is not tracked."""
        if str(attempt.paths.root) not in self._begun:
            return
        self._ended.add(str(attempt.paths.root))
        self._send({"do": "end", "attempt": str(attempt.paths.root)})

    def summary(self, sweep: SweepPaths) -> None:
        """Writes the sweep's summary and the runs of its points that are still missing."""
        if (of_sweep := self._names_of(sweep)) is not None:
            self._summary = {"do": "summary", "experiment": of_sweep.experiment, "sweep": str(sweep.root)}
            self._send(self._summary)

    def warnings(self) -> list[str]:
        """Problems since the last call, as text for the screen. Never blocks."""
        self._listen(0)
        self._revive()
        new, self._warnings = self._warnings, []
        return new

    def close(self) -> None:
        """Returns when everything has been written, or when the child has done nothing for CLOSE_S."""
        while True:
            self._revive()
            process = self._process
            if process is None or self._stop(process) or process.returncode == 0:
                break
        self._process = None

    def _stop(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the process to end. Returns whether it had to be killed."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        deadline = time.monotonic() + CLOSE_S
        while self._running() and time.monotonic() < deadline:
            if self._listen(0.05):
                deadline = time.monotonic() + CLOSE_S
        is_late = self._running()
        if is_late:
            process.kill()
            self._warn(f"it was not done after {CLOSE_S:g} s and was stopped")
        process.wait()
        self._listen(0)
        return is_late

    def _revive(self) -> None:
        """Replaces a child that died, and sends the new one the runs that are not complete."""
        if self._start is None or self._process is None or self._running():
            return
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._starts_left == 0:
            self._warn(f"its process {how} repeatedly; the next command completes what is missing")
            self._process = None
            return
        self._starts_left -= 1
        self._warn(f"its process {how} and was started again")
        self._process, self._unended = self._start(), b""
        self._send(self._opened)
        if self._sweep:
            self._send(self._sweep)
        for attempt, message in self._begun.items():
            if tracking_notes.is_noted(self._output, attempt):
                self._send({**message, "again": True})
                if attempt in self._ended:
                    self._send({"do": "end", "attempt": attempt})
        if self._summary:
            self._send({**self._summary, "again": True})

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):  # the child is gone: its replacement is sent everything again
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

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


def start_tracker(config: RunConfig, output: Path, sweep: SweepPaths | None = None) -> Tracker:
    """Starts the tracker of this command; with tracking=none, a tracker without a process.

    Its slow import and the creation of a new store run while the command continues.
    """
    if config.tracking.kind is TrackingKind.none:
        return Tracker()
    uri = store_uri(config, output, os.environ)
    output.mkdir(parents=True, exist_ok=True)
    # Checked before the child process can create it.
    makes_store = uri == names.local_uri(output) and not store_path(output).exists()

    def child() -> subprocess.Popen[bytes]:
        return _start_child(["follow", "--uri", uri, str(output)], output, subprocess.PIPE)

    tracker = Tracker(output, child, makes_store=makes_store)
    tracker.open(config, sweep)
    return tracker


def complete_left_behind(output: Path) -> subprocess.Popen[bytes] | None:
    """Starts a process that completes the runs that dead commands left in MLflow, and does not wait for it. None if
    there are no such runs. The check is cheap, so every command makes it."""
    if not tracking_notes.left_behind(output):
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
