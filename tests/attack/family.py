"""Runs a command and all its descendants as forks of one warm process, and kills one of them at a given point.

A real sweep starts a Python for its controller, its tracker, each launcher and each rank: most of a second of imports
per process. Here `subprocess.Popen` forks instead whenever one of our own programs is started (children.words). The
fork gets the same words, environment, streams, session and signals as the real process and therefore does the same; a
kill costs a tenth of a second.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.kill_points import Aim, KillPoints, notes

from orchestrator.machine import children
from orchestrator.records import record_file
from zero_runtime.process_identity import started

# The roles of our programs, by module and first word.
ROLES = {
    "orchestrator.launch.controller": "controller",
    "orchestrator.launch.local_executor controller": "launcher",
    "orchestrator.launch.local_executor rank": "rank",
    "orchestrator.tracking.process follow": "tracker",
    "orchestrator.tracking.process complete": "completer",
    "orchestrator.wings.predict.count": "shapes",
}
_PR_SET_NAME = 15
_FAILED = 70
_popen_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class Member(NamedTuple):
    """A process of the family; its name is, for example, "/command0/controller0/launcher1/rank0"."""

    pid: int
    name: str

    @property
    def role(self) -> str:
        return role_of(self.name)


class Family:
    """One command's processes. The log records what they change (see KillPoints) and the start of each process."""

    def __init__(self, log: Path, watched: Sequence[Path], aim: Aim | None = None) -> None:
        self.log = log
        self._points = KillPoints(log, watched, "", aim)
        self._title = f"za-{os.getpid()}".encode()
        self._name = ""
        self._children: Counter[str] = Counter()

    def start(self, command: Callable[[], int], screen: Path) -> int:
        """Starts the command as a child of this process, with its output in the file `screen`, and returns its pid."""

        def begin() -> int:
            descriptor = os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._take_streams((os.open(os.devnull, os.O_RDONLY), descriptor, descriptor))
            subprocess.Popen._execute_child = self._executor()  # type: ignore[attr-defined]
            sys.addaudithook(self._points)
            return command()

        return self._fork("command", begin)

    def living(self) -> list[Member]:
        names = {pid: name for pid, (name,) in notes(self.log, "born")}
        found = [pid for pid in names if self._is_ours(pid)]
        if not found:  # one may have been forked and not be in the log yet
            found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_ours(int(path.name))]
        return [Member(pid, names.get(pid, "")) for pid in found]

    def _is_ours(self, pid: int) -> bool:
        """Whether the process runs and has our title, which forks inherit: its pid may belong to another by now."""
        try:
            return Path(f"/proc/{pid}/comm").read_bytes().strip() == self._title and started(pid) is not None
        except OSError:
            return False

    def close(self) -> None:
        os.close(self._points.log)

    # ---- in the family -------------------------------------------------------------------------------------------

    def _fork(self, role: str, run: Callable[[], int]) -> int:
        name = f"{self._name}/{role}{self._children[role]}"
        self._children[role] += 1
        if pid := os.fork():
            return pid
        code = _FAILED
        try:
            self._name, self._children = name, Counter()
            self._points.begin(role_of(name))
            ctypes.CDLL(None).prctl(_PR_SET_NAME, self._title, 0, 0, 0)
            self._points.note("born", name)
            code = run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def _executor(self) -> Callable[..., None]:
        family = self

        def execute(popen: Any, args: Any, *rest: Any) -> None:
            (_, _, _, _, _, env, _, _, _, *ends) = rest
            program = _program(args)
            if program is None:
                _popen_execute(popen, args, *rest)
                return
            role = ROLES.get(" ".join(program[:2]), ROLES.get(program[0], ""))
            ends, is_leader = ends[:6], ends[11]
            popen.pid = family._fork(role, lambda: family._become(program, env, ends, is_leader))
            popen._child_created = True
            popen._close_pipe_fds(*ends)

        return execute

    def _become(self, words: list[str], env: dict[str, str] | None, ends: list[int], is_leader: bool) -> int:
        """Does what a new Python would do for `children.words(*words)`."""
        if is_leader:
            os.setsid()
        self._take_streams((ends[0], ends[3], ends[5]))
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        record_file.warn_once.cache_clear()
        record_file.logger.handlers.clear()
        record_file.logger.propagate = True
        sys.argv = list(words)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is already imported
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return 0

    def _take_streams(self, streams: Sequence[int]) -> None:
        """Makes these stdin, stdout and stderr (-1: unchanged); closes all others except the log, as exec would."""
        for target, source in enumerate(streams):
            if source not in (-1, target):
                os.dup2(source, target)
        os.closerange(3, self._points.log)
        os.closerange(self._points.log + 1, 1024)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  as long as the process lives
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115


def role_of(name: str) -> str:
    """`rank1` for "/command0/controller0/launcher2/rank1"; for other processes the last word without its number."""
    last = name.rpartition("/")[2]
    return last if last.startswith("rank") else last.rstrip("0123456789")


def _program(args: Any) -> list[str] | None:
    """The module and its words if one of our own programs is started, else None."""
    words = [str(word) for word in args] if isinstance(args, (list, tuple)) else []
    script = os.path.abspath(children.__file__)
    return words[words.index(script) + 1 :] if script in words else None
