"""The slots of this machine: GPUs or CPU cores, each held by one run at a time across all commands of a user.

A slot is held by a lock on a file in a folder that all commands of the user share (locks.py), so that two sweeps on
one machine take turns instead of disturbing each other.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from orchestrator.config.schema import Device, ResolvedResources
from orchestrator.machine import hardware, locks
from orchestrator.text.paths import program
from orchestrator.text.streams import one_line
from orchestrator.text.units import duration

LOCKS = "ZLAB_LOCKS"
WAIT_TOLD_S = 30.0
FIX = f"set {LOCKS} to a folder of yours, or unset it"


class LocksError(OSError):
    """The folder for the locks of slots cannot be used; the message says why and what to do."""


def locks_folder() -> Path:
    """The user's folder for locks, or the one given in ZLAB_LOCKS. LocksError if it cannot be used."""
    folder = Path(os.environ.get(LOCKS) or Path(tempfile.gettempdir()) / f"zlab-locks-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocksError(f"{folder}: expected a folder that can be made, {error.strerror}; {FIX}") from None
    if (owner := folder.stat().st_uid) != os.getuid():
        raise LocksError(f"{folder}: expected a folder of user {os.getuid()}, found one of user {owner}; {FIX}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LocksError(f"{folder}: expected a folder that can be written to; {FIX}")
    return folder


@dataclass(frozen=True)
class Slot:
    """`name` is unique on this machine; `visible` is its entry of CUDA_VISIBLE_DEVICES, empty for a core."""

    name: str
    visible: str = ""


class Lease(contextlib.AbstractContextManager["Lease"]):
    """Slots that this process holds until `release` or until it ends."""

    def __init__(self, slots: Sequence[Slot], files: Sequence[IO[str]]) -> None:
        self.slots = tuple(slots)
        self._files = files

    @property
    def gpus(self) -> list[str] | None:
        """The entries of CUDA_VISIBLE_DEVICES for the holder; None if the slots are cores."""
        return [slot.visible for slot in self.slots] if self.slots[0].visible else None

    def release(self, *_error: object) -> None:
        for file in self._files:
            file.close()

    __exit__ = release


class SlotPool:
    """The slots that this command may use. `holder`: what other commands read about who holds one; default: the
    command as it was typed."""

    def __init__(self, slots: Sequence[Slot], folder: Path | None = None, holder: str = "") -> None:
        self.slots = tuple(slots)
        self._folder = folder or locks_folder()
        typed = textwrap.shorten(f"{program()} {shlex.join(sys.argv[1:])}", 100, placeholder=" ...")
        self._holder = one_line(holder or typed)
        self._waits_since = self._told_at = 0.0  # on the monotonic clock; 0: does not wait

    def take(self, count: int) -> Lease | None:
        """Leases `count` free slots, neighbours if possible; returns None and holds none if fewer are free.

        A count above the number of slots means all of them, since there may be more CPU ranks than cores.
        """
        count = min(count, len(self.slots))
        held: dict[int, IO[str]] = {}
        for index, slot in enumerate(self.slots):
            if (file := self._lock(slot)) is not None:
                held[index] = file
        chosen = _neighbours(sorted(held), count)
        for index in held.keys() - set(chosen):
            held[index].close()
        if len(chosen) < count:
            return None
        self._waits_since = 0.0
        return Lease([self.slots[index] for index in chosen], [held[index] for index in chosen])

    def waiting_text(self) -> str:
        """A line to print while `take` gives nothing: for whom it waits, how long so far, and the ways out.

        Empty between two times to tell it, and if nobody holds a slot.
        """
        now, holders = time.monotonic(), self.holders()
        if not holders or (self._waits_since and now - self._told_at < WAIT_TOLD_S):
            return ""
        self._told_at, self._waits_since = now, self._waits_since or now
        return (
            f"waiting {duration(now - self._waits_since)} for slots that another command holds: {'; '.join(holders)}. "
            f"Ctrl-C ends the wait, {program()} cancel SWEEP ends a sweep, fewer resources.ranks need fewer slots; "
            f"with {LOCKS}=FOLDER both run at once and disturb each other"
        )

    def holders(self) -> list[str]:
        """The slots that are held now, by whom and since when, such as "core0 core1: sweep 2026-01-01_00-00-00_stages
        (pid 17), since 15:04"."""
        held: dict[str, list[str]] = {}
        for slot in self.slots:
            file = self._lock(slot)
            if file is not None:
                file.close()
                continue
            with contextlib.suppress(OSError):
                path = self._folder / f"{slot.name}.lock"
                since = time.strftime("%H:%M", time.localtime(path.stat().st_mtime))
                text = f"{path.read_text(encoding='utf-8').strip()}, since {since}"
                # Empty between the lock and the name.
                held.setdefault(text if text[0] != "," else "a command that has just begun", []).append(slot.name)
        return [f"{' '.join(names)}: {holder}" for holder, names in held.items()]

    def _lock(self, slot: Slot) -> IO[str] | None:
        file = locks.take(self._folder / f"{slot.name}.lock", wait=False)
        if file is not None:
            file.truncate(0)
            file.write(f"{self._holder} (pid {os.getpid()})\n")
            file.flush()
        return file


def _neighbours(free: Sequence[int], count: int) -> list[int]:
    """The first `count` consecutive numbers, else the first `count` numbers; empty if there are fewer."""
    for start in range(len(free) - count + 1):
        if free[start + count - 1] - free[start] == count - 1:
            return list(free[start : start + count])
    return list(free[:count]) if len(free) >= count else []


def wanted(resources: ResolvedResources) -> int:
    """The number of slots that a run needs: one GPU per rank, or one core per thread of its ranks."""
    return resources.ranks if resources.device is Device.cuda else resources.ranks * resources.threads


def pool_of(device: Device, holder: str = "") -> SlotPool:
    """The slots of this machine, GPUs or cores, that this process may use."""
    if device is Device.cuda:
        gpus = [Slot(f"gpu-{gpu.uuid or gpu.visible}", gpu.visible) for gpu in hardware.visible_gpus()]
        return SlotPool(gpus, holder=holder)
    return SlotPool([Slot(f"core{number}") for number in range(hardware.usable_cores())], holder=holder)


def busy_gpus(slots: Sequence[Slot]) -> list[str]:
    """One line for each process that computes on a GPU among the slots."""
    names = {slot.name for slot in slots}
    return [
        f"GPU {uuid}: process {pid} uses {used}"
        for uuid, pid, used in hardware.gpu_processes()
        if f"gpu-{uuid}" in names
    ]
