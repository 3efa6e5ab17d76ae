"""Identifies processes despite pid reuse and clock changes, and the creators of files. Standard library only.

Pids are reused, so a process is identified by its pid and its start time. A file that only its creator can complete or
remove has the creator's `mark` in its name; a later process removes it if the creator `has_ended`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
_MARK = re.compile(r"(?P<host>[0-9a-f]{8})\.(?P<boot>[0-9a-f]{8})\.(?P<space>\d+)\.(?P<pid>\d+)\.(?P<ticks>\d+)")


class ProcessStat(NamedTuple):
    """`state`: the state letter of proc(5). `ticks`: the start time, in clock ticks since the machine booted."""

    state: str
    ticks: int

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; true for a zombie, which only waits for its parent to collect its status."""
        return self.state in ("Z", "X")


def has_proc() -> bool:
    """Whether this system lists processes under /proc."""
    return (PROC / "self" / "stat").exists()


def process_stat(pid: int) -> ProcessStat | None:
    """State and start time of the process; None if there is no such process or no /proc."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name, in parentheses, may contain spaces and parentheses
    return ProcessStat(fields[0], int(fields[19]))


def started(pid: int) -> str | None:
    """A token that is unique to the process and constant while it runs; None if it has ended."""
    # The wall clock cannot give the start time: NTP, a resumed virtual machine or an operator may shift it by seconds
    # or hours while processes run, and what is derived from it (psutil's create_time on Linux) changes with it. The
    # kernel's ticks since the boot never change.
    stat = process_stat(pid)
    return None if stat is None or stat.has_ended else f"{stat.ticks}@{boot_id()}"


@functools.cache
def boot_id() -> str:
    """The kernel's id of the machine's current boot; empty if the system does not provide it."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def own_age_s() -> float:
    """Seconds since this process started; 0 if the system does not provide it."""
    stat = process_stat(os.getpid())
    if stat is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    try:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:  # a sandbox may define the clock's name without supporting it
        return 0.0


# ---- owners of files -------------------------------------------------------------------------------------------------


def mark(pid: int | None = None) -> str:
    """An identifier of this process, or of the one with this pid, for file names."""
    pid = os.getpid() if pid is None else pid
    stat = process_stat(pid)
    return f"{_host()}.{_short(boot_id())}.{_namespace()}.{pid}.{0 if stat is None else stat.ticks}"


def has_ended(name: str) -> bool:
    """Whether every process whose mark is in the file name is known to have ended; False without a mark."""
    marks = list(_MARK.finditer(name))
    return bool(marks) and all(_is_gone(found) for found in marks)


def remove_left_behind(paths: Iterable[Path]) -> list[Path]:
    """Remove this user's files and folders whose creators have ended; returns the removed paths. Never raises."""
    gone = []
    for path in paths:
        if not has_ended(path.name):
            continue
        try:
            if path.lstat().st_uid != os.geteuid():
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:  # another process is removing it too, or removing it is not permitted
            continue
        gone.append(path)
    return gone


def _is_gone(found: re.Match[str]) -> bool:
    # Whether a creator on another machine or in another container still runs cannot be determined here.
    if found["host"] != _host():
        return False
    if found["boot"] != _short(boot_id()):
        return True
    if int(found["space"]) != _namespace():
        return False
    if has_proc():
        stat = process_stat(int(found["pid"]))
        return stat is None or stat.has_ended or stat.ticks != int(found["ticks"])
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _host() -> str:
    return _short(socket.gethostname())


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _namespace() -> int:
    """The id of this process's pid namespace, within which a pid means one process; 0 if unknown."""
    try:
        return (PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0
