"""Which process a pid means, by what no step of the clock moves, and whose a file is. The standard library alone.

[Note: clock steps]
A pid is used again, so a process is known by its pid and its start. The wall clock cannot tell the start: NTP, a
resumed virtual machine or an operator may set it by seconds or hours while processes live, and what is derived from it
(psutil's create_time on Linux) moves along. The kernel keeps the start in ticks since the machine booted (proc(5), stat
field 22), which never changes; together with the id of the boot it names a process of this machine for good.

[Note: owners of files]
What only its maker can complete or remove has the maker's `mark` in its name. A later process removes it where the
maker `has_ended`: a process of this machine that is gone, or one of before this machine's last boot. What another
machine, another container or an unknown program made stays: nobody here can tell whether its maker lives.
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
    """`state`: the letter of proc(5). `ticks`: the start, in clock ticks since the machine booted."""

    state: str
    ticks: int

    @property
    def has_ended(self) -> bool:
        """A zombie has ended too: it only waits for its parent to ask."""
        return self.state in ("Z", "X")


def has_proc() -> bool:
    """Whether this system tells of processes under /proc."""
    return (PROC / "self" / "stat").exists()


def process_stat(pid: int) -> ProcessStat | None:
    """None where there is no such process, or no /proc."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command before it may contain anything
    return ProcessStat(fields[0], int(fields[19]))


def started(pid: int) -> str | None:
    """A token of the process: the same for as long as it lives, and no other process's. None where it has ended."""
    stat = process_stat(pid)
    return None if stat is None or stat.has_ended else f"{stat.ticks}@{boot_id()}"


@functools.cache
def boot_id() -> str:
    """Which boot of which machine this is; empty where the system does not tell."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def own_age_s() -> float:
    """For how long this process has run; 0 where the system does not tell."""
    stat = process_stat(os.getpid())
    if stat is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    try:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:  # a sandbox may know the name of the clock alone
        return 0.0


# ---- owners of files -------------------------------------------------------------------------------------------------


def mark(pid: int | None = None) -> str:
    """This process, or the one with this pid, in letters that any file name may hold. See [Note: owners of files]."""
    pid = os.getpid() if pid is None else pid
    stat = process_stat(pid)
    return f"{_host()}.{_short(boot_id())}.{_namespace()}.{pid}.{0 if stat is None else stat.ticks}"


def has_ended(name: str) -> bool:
    """Whether every process that is marked in a file's name is known to have ended; False where there is no mark."""
    marks = list(_MARK.finditer(name))
    return bool(marks) and all(_is_gone(found) for found in marks)


def remove_left_behind(paths: Iterable[Path]) -> list[Path]:
    """Remove the files and folders of this user's whose makers have ended; those that went. Never raises."""
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
        except OSError:  # another process of ours removes it too, or nobody may
            continue
        gone.append(path)
    return gone


def _is_gone(found: re.Match[str]) -> bool:
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
    """Pids mean the same processes within one of these."""
    try:
        return (PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0
