"""Operating system processes: output of programs, whether one is alive, signals, and ending a whole session."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import psutil

from zero_runtime import process_identity

_PR_SET_PDEATHSIG = 1
PATIENCE_S = 5.0  # time in which the processes of a session must have ended
TELLING = re.compile(
    r"error|assert|what\(\)|fatal", re.IGNORECASE
)  # what marks the line that tells why a process ended
LAST_BYTES, LAST_SIGNS = 1 << 14, 300


def output_of(*words: str, timeout_s: float = 20, folder: Path | None = None) -> str | None:
    """The output of a program, run in `folder`; None if it is missing, fails, or does not end within `timeout_s`."""
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def started(pid: int) -> str | None:
    """A token that identifies the process for as long as it lives; None if there is no such process, or only a zombie.

    The pid alone is not enough, since pids are reused. The token does not change when the clock is set: see
    process_identity.py.
    """
    if process_identity.has_proc():
        return process_identity.started(pid)
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def is_alive(pid: int, token: object) -> bool:
    """Whether the process with this token of `started` still runs."""
    current = started(pid)
    return current is not None and current == token


def how_it_ended(code: int, stderr: IO[bytes] | None = None) -> str:
    """The end of a process in words, such as "ended with SIGABRT: " and its last words.

    code: its exit code, or minus the number of the signal. stderr: a file with what it has printed. Of its last lines,
    the last one that names an error; the end of a C++ program prints a stack after it.
    """
    text = f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    if stderr is None:
        return text
    stderr.seek(max(stderr.seek(0, os.SEEK_END) - LAST_BYTES, 0))
    lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if TELLING.search(line)] or lines
    return f"{text}: {telling[-1][:LAST_SIGNS]}" if telling else text


class StoppedBySignal(KeyboardInterrupt):
    """The command was asked to stop by a signal other than Ctrl-C."""


def signals_interrupt() -> AbstractContextManager[None]:
    """Makes SIGTERM and SIGHUP raise StoppedBySignal, so that they unwind like Ctrl-C. Only for the main thread."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise StoppedBySignal(signal.Signals(number).name)

    return _handler_of(stop, signal.SIGTERM, signal.SIGHUP)


def signals_ignored() -> AbstractContextManager[None]:
    """Ignores signals while a second Ctrl-C would leave processes behind. Only for the main thread."""
    return _handler_of(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _handler_of(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def die_with_parent(parent: int) -> None:
    """From now on, this process is killed when its parent ends, for whatever reason. Linux only.

    `parent`: pid of the expected parent; if it has ended already, the call ends this process. The kernel watches the
    thread that started this process, so such children must be started from the main thread of their parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def redirect_output(log: Path) -> None:
    """Appends all further output of this process to the log, including output of C libraries."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def session_members(session: int) -> list[int]:
    """The pids of the processes of a session, without zombies."""
    return [pid for pid in psutil.pids() if _session_of(pid) == session and started(pid) is not None]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # the process has ended
        return None


def end_session(session: int) -> bool:
    """Kills every process of the session; True if none is left. The caller still has to reap the leader, its child.

    The leader is killed last, because it reaps its children. In a container where pid 1 reaps no processes, they would
    otherwise stay zombies.
    """
    deadline = time.monotonic() + PATIENCE_S
    alone_since: float | None = None
    while True:
        others = [pid for pid in session_members(session) if pid != session]
        for pid in others:
            _kill(pid)
        if not others:
            alone_since = alone_since or time.monotonic()
            if started(session) is None:
                return True
            if time.monotonic() - alone_since > 0.5:  # the leader has had time to reap them
                _kill(session)
        if time.monotonic() > deadline:
            _kill(session)
            return False
        time.sleep(0.02)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
