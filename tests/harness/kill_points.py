"""Points at which a process may be killed: before each change that it makes to files, named and counted.

The contents of the disk change only by calls that Python reports to its audit hooks before it makes them (open, rename,
mkdir, remove). So killing a process before each of these calls covers all states that a SIGKILL can leave behind,
except for one in the middle of a write.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The index of the argument that names the path that changes.
_CALLS = {"open": 0, "os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.truncate": 0}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MARK = re.compile(r"[0-9a-f]{8}\.[0-9a-f]{8}\.\d+\.\d+\.\d+")
_HASH = re.compile(r"[0-9a-f]{8,}")


class Change(NamedTuple):
    """A kind of change: the role of the process, the call, and the file's name, in which every number is a #."""

    role: str
    call: str
    name: str


class Aim(NamedTuple):
    """SIGKILL for the first process that reaches its `count`-th change of this kind, before it makes that change."""

    change: Change
    count: int


class KillPoints:
    """The audit hook of a process. Each change is a line in `log`: `change` or `killed`, pid, role, call, name."""

    def __init__(self, log: Path, watched: Sequence[Path], role: str, aim: Aim | None = None) -> None:
        """`watched`: the folders whose changes count. `aim` kills one of the processes that share a log."""
        self._path, self._aim = log, aim
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._watched = tuple(map(str, watched))
        self.begin(role)

    def begin(self, role: str) -> None:
        """Count from 0 under this role: to be called in a new process after a fork."""
        self._role = role
        self._changes: Counter[Change] = Counter()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _CALLS or (event == "open" and not args[2] & _WRITES):
            return
        path = args[_CALLS[event]]
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        path = os.fsdecode(path)
        if event not in ("open", "os.truncate") and args[-1] not in (-1, None):  # relative to an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{args[-1]}"), path)
        if not path.startswith(self._watched):
            return
        change = Change(self._role, event, plain(path))
        self._changes[change] += 1
        is_end = self._aim == (change, self._changes[change]) and self._is_first()
        self.note("killed" if is_end else "change", *change)
        if is_end:
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, *words: str) -> None:
        """Write a line to the log, with this process's pid."""
        os.write(self.log, "\t".join([words[0], str(os.getpid()), *words[1:], "\n"]).encode(errors="backslashreplace"))

    def _is_first(self) -> bool:
        try:
            os.mkdir(self._path.with_suffix(".aimed"))
        except FileExistsError:
            return False
        return True


def notes(log: Path, what: str) -> list[tuple[int, list[str]]]:
    """The pids and remaining words of the log's lines that begin with `what`."""
    lines = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()]
    return [(int(pid), words[:-1]) for sort, pid, *words in lines if sort == what]


def kinds(log: Path) -> list[Aim]:
    """Each kind of change in the log with its highest count in any one process, in sorted order."""
    most: Counter[Change] = Counter()
    found = notes(log, "change")
    for pid in {pid for pid, _ in found}:
        most |= Counter(Change(*words) for other, words in found if other == pid)
    return [Aim(change, count) for change, count in sorted(most.items())]


def plain(path: str) -> str:
    """The name of a file without the parts that differ between runs."""
    return re.sub(r"\d+", "#", _HASH.sub("HASH", _MARK.sub("MARK", Path(path).name)))
