"""Detects, by Python's audit events, what the product must not do while it reads an input, and stops it there.

An audit hook is called for every start of a process, every connection, import and change of a file, whichever module
does it, and cannot be removed from a process: so there is only one, and it does nothing outside `Sandbox.watching`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

STARTS = {
    *("subprocess.Popen", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.exec", "os.system", "pty.spawn"),
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"),
    *("webbrowser.open", "urllib.Request"),
}
# What a command that only reads and checks may import: our packages, Hydra and its parsers, terminal output.
OWN = {"orchestrator", "zero_runtime", "hydra", "omegaconf", "antlr4", "yaml", "_yaml", "psutil"}
OWN |= {"rich", "markdown_it", "mdurl", "pygments"}
# The page of a report: its pictures and its template, with what these import.
OWN |= {"matplotlib", "mpl_toolkits", "numpy", "PIL", "contourpy", "cycler", "kiwisolver", "pyparsing", "dateutil"}
OWN |= {"packaging", "six", "jinja2", "markupsafe"}
TENSORS = {"torch", "numpy", "safetensors"}
# For each audit event that changes files: the argument positions of a path and of the folder that it is relative to.
CHANGES = {
    **{"os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.rename": ((0, 2), (1, 3)), "os.truncate": ((0, None),)},
    **{"os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.link": ((1, 3),), "os.symlink": ((1, 2),)},
    **{"os.utime": ((0, 3),), "os.setxattr": ((0, None),)},
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Limits for one input, which takes milliseconds. Both are far above that: they only stop inputs that would never end.
CPU_S = 20
MORE_BYTES = 3 << 30


class Stopped(BaseException):
    """Raised at a forbidden action; no code of the product may catch it."""


class Endless(Stopped):
    """The input took too much CPU time."""


class Sandbox:
    """The only one of its process. `seen`: forbidden actions since `watching` began, as (kind, description)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._is_watching = False
        self._may_write: tuple[str, ...] = ()
        self._may_import: frozenset[str] = frozenset()
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def watching(self, may_write: Sequence[Path], may_import: Sequence[str] = ()) -> Iterator[None]:
        """Allows changes to files below `may_write`, and imports of `may_import`, OWN and the standard library."""
        self.seen = []
        self._may_write = tuple(f"{os.path.abspath(folder)}" for folder in may_write)
        self._may_import = frozenset({*OWN, *sys.stdlib_module_names, *may_import})
        with limited_cpu(), limited_memory():
            self._is_watching = True
            try:
                yield
            finally:
                self._is_watching = False

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_watching:
            return
        if event in STARTS:
            self._stop("started", f"{event} {args!r:.300}")
        elif event == "import" and args[0].split(".")[0] not in self._may_import:
            self._stop("imported", args[0])
        elif event == "open" and _writes(args[1], args[2]):
            self._judge(event, args[0], None)
        elif event == "os.mkdir" and not self._is_allowed(_absolute(args[0], args[2])):
            # A typed path may point anywhere; the test must not create a folder there.
            raise PermissionError(13, "no folder is made outside of the test", os.fsdecode(args[0]))
        elif event in CHANGES:
            for place, folder in CHANGES[event]:
                self._judge(event, args[place], None if folder is None else args[folder])

    def _judge(self, event: str, path: Any, folder: Any) -> None:
        if isinstance(path, int):
            return  # a file that was opened before
        found = _absolute(path, folder)
        if found != os.devnull and "__pycache__" not in found and not self._is_allowed(found):
            self._stop("changed", f"{event} {found}")

    def _is_allowed(self, path: str) -> bool:
        return any(path == one or path.startswith(f"{one}{os.sep}") for one in self._may_write)

    def _stop(self, kind: str, what: str) -> None:
        self.seen.append((kind, what))
        raise Stopped(f"{kind}: {what}")


def _writes(mode: Any, flags: Any) -> bool:
    return any(sign in (mode or "") for sign in "wax+") or (mode is None and bool((flags or 0) & WRITING))


def _absolute(path: Any, folder: Any) -> str:
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0:
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    return os.path.abspath(text)


@contextlib.contextmanager
def limited_cpu() -> Iterator[None]:
    """Limits CPU time instead of wall time, since a busy machine does not increase it."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Endless(f"still at work after {CPU_S} s of CPU")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Turns unbounded growth into a MemoryError before the machine runs out of memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


SANDBOX = Sandbox()
