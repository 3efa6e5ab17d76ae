"""A rank's process as seen by the other ranks of its machine: whether it is alive, and the files of a dead one."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zero_runtime.process_identity import mark, process_stat, remove_left_behind, started
from zero_runtime.watch.journal import Journal, Op, RankPosition, read_journal
from zero_runtime.watch.judge import RankStatus

_STACK_FRAMES = 14
# A stack has several frames of these files for each module, between the model's own frames, which readers look for.
_BORING = (
    *("torch/nn/modules/module.py", "torch/_tensor.py", "torch/autograd/__init__.py", "torch/autograd/graph.py"),
    *("same_host/messages.py", "same_host/group.py", "same_host/progress.py", "/threading.py"),
)
_CRASH_LINES = 40
_FOLDER = "zero_rank_"


@dataclass(frozen=True)
class Whereabouts:
    """Identifies a rank's process and its folder.

    `machine` is the same for ranks that see each other's processes and files.
    """

    machine: str
    pid: int
    started: str
    folder: str

    def standing(self) -> RankStatus | None:
        """GONE, STOPPED or RUNNING; None if the process is on another machine."""
        if self.machine != _machine():
            return None
        stat = process_stat(self.pid)
        if stat is None or started(self.pid) != self.started:
            return RankStatus.GONE
        return RankStatus.STOPPED if stat.state in ("T", "t") else RankStatus.RUNNING

    def left_behind(self) -> tuple[RankPosition | None, list[Op], str]:
        """The position and collectives of a rank of this machine, and its stacks if Python handled a fatal signal.

        None and empty values if the rank is on another machine or its journal cannot be read.
        """
        if self.machine != _machine():
            return None, [], ""
        try:
            place, ops = read_journal(Path(self.folder, "journal"))
        except OSError:
            return None, [], ""
        crash = ""
        with contextlib.suppress(OSError):
            lines = Path(self.folder, "crash").read_text(encoding="utf-8", errors="replace").splitlines()
            crash = "\n".join(line for line in lines[:_CRASH_LINES] if not line.startswith("Extension modules"))
        return place, ops, crash


class OwnProcess:
    """This rank's folder: its journal, and a file for the stacks that a fatal signal leaves."""

    def __init__(self) -> None:
        # The other ranks read the files of a dead rank, so its folder stays until the whole job has ended (has_ended):
        # its name has the marks of this process and of its parent.
        remove_left_behind(Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"))
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{mark()}_{mark(os.getppid())}_"))
        self.journal = Journal(self._folder / "journal")
        self._crash = (self._folder / "crash").open("wb")
        self._handles_faults = not faulthandler.is_enabled()  # one that is enabled already writes where the user chose
        if self._handles_faults:
            faulthandler.enable(self._crash)
        self._working_thread = threading.get_ident()
        own = os.getpid()
        self.whereabouts = Whereabouts(_machine(), own, started(own) or "", str(self._folder))

    def stack(self) -> str:
        """The stacks of the thread that created this object and of other threads inside the runtime (autograd's on
        CUDA)."""
        texts = []
        for ident, frame in sys._current_frames().items():
            summary = traceback.extract_stack(frame)
            busy = any("zero_runtime" in step.filename for step in summary)
            if ident == self._working_thread or (busy and ident != threading.get_ident()):
                texts.append("".join(format_frames(summary)))
        return "".join(texts)

    def close(self) -> None:
        """Remove the folder. The journal may still be written, but other processes can no longer read it."""
        if self._handles_faults:
            faulthandler.disable()
        self._crash.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def format_frames(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """The innermost frames, without torch's own frames between those of the model."""
    kept = [frame for frame in frames if not frame.filename.endswith(_BORING)]
    return traceback.format_list(kept[-_STACK_FRAMES:])


def remove_folder(whereabouts: Whereabouts) -> None:
    """Remove the folder of a dead rank, if it is on this machine."""
    if whereabouts.machine == _machine():
        shutil.rmtree(whereabouts.folder, ignore_errors=True)


def _machine() -> str:
    """The host name with the namespaces of pids and mounts.

    Containers may share a host name, but see each other's processes and files only within the same namespaces.
    """
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # no /proc: only this process is visible
