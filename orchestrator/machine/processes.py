"""Processes of the operating system: who is alive, whose session they belong to, and how to end them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from zero_runtime import process_identity

_PR_SET_PDEATHSIG = 1


def started(pid: int) -> str | None:
    """A token of the process, the same for as long as it lives; None when there is none, or only a zombie.

    A pid alone is used again by others. No step of the clock moves the token: process_identity [Note: clock steps].
    """
    if process_identity.has_proc():
        return process_identity.started(pid)
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def is_alive(pid: int, token: object) -> bool:
    """Whether the process with this token of `started` still runs. Records of before have no token but a float, which
    no process has: their processes count as gone."""
    found = started(pid)
    return found is not None and found == token


class StoppedBySignal(KeyboardInterrupt):
    """Somebody asked the command to stop with a signal that is not Ctrl-C."""


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """A polite end of the terminal or from `kill` unwinds as Ctrl-C does. For the main thread."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise StoppedBySignal(signal.Signals(number).name)

    before = {one: signal.signal(one, stop) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def die_with_parent(parent: int) -> None:
    """From now on this process is killed when its parent ends, however that ends. Linux; elsewhere no effect.

    `parent` is the expected parent: when it is gone already, the call ends this process.
    The kernel watches the parent's thread that made this process: start such children from the main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def redirect_output(log: Path) -> None:
    """Everything that this process writes from here on, libraries in C too, goes to its log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def session_members(session: int) -> list[int]:
    """Pids of the processes of a session, less zombies."""
    return [pid for pid in psutil.pids() if _session_of(pid) == session and started(pid) is not None]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it ended meanwhile
        return None


def end_session(session: int, *, patience_s: float = 5.0) -> bool:
    """Kills every process of the session; True when none is left. The caller still reaps the leader, its child.

    The leader goes last: it reaps its children, and without it they would stay zombies where pid 1 reaps nothing.
    """
    deadline = time.monotonic() + patience_s
    alone_since: float | None = None
    while True:
        others = [pid for pid in session_members(session) if pid != session]
        for pid in others:
            _kill(pid)
        if not others:
            alone_since = alone_since or time.monotonic()
            if started(session) is None:
                return True
            if time.monotonic() - alone_since > 0.5:
                _kill(session)
        if time.monotonic() > deadline:
            _kill(session)
            return False
        time.sleep(0.02)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
