"""The slots of this machine: GPUs, or CPU cores, each held by one run at a time, whoever started it.

[Note: locks] A slot is held by an flock on a file in a folder that all of this user's commands share, so a lease ends
with the process that has it, however that ends. Two sweeps on one machine take turns instead of disturbing each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from orchestrator.config.schema import Device, Resources
from orchestrator.machine import hardware

LOCKS = "ZLAB_LOCKS"
FIX = f"set {LOCKS} to a folder of yours, or unset it"


class LocksError(OSError):
    """There is no folder for the locks of slots; the message says why and what to do."""


def locks_folder() -> Path:
    """This user's; ZLAB_LOCKS names another. LocksError where it cannot be used."""
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


class Lease:
    """Slots that are held until `release`, or until this process ends."""

    def __init__(self, slots: Sequence[Slot], files: Sequence[IO[str]]) -> None:
        self.slots = tuple(slots)
        self._files = files

    @property
    def gpus(self) -> list[str] | None:
        """The CUDA_VISIBLE_DEVICES of who holds it; None where its slots are cores."""
        return [slot.visible for slot in self.slots] if self.slots[0].visible else None

    def release(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SlotPool:
    """The slots that this command may use."""

    def __init__(self, slots: Sequence[Slot], folder: Path | None = None) -> None:
        self.slots = tuple(slots)
        self._folder = folder or locks_folder()

    def take(self, count: int) -> Lease | None:
        """`count` free slots, neighbours where there are enough; None, and none held, where fewer are free.

        More than there are is all of them: CPU ranks may be more than cores.
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
        return Lease([self.slots[index] for index in chosen], [held[index] for index in chosen])

    def holders(self) -> list[str]:
        """Who holds slots now: "core0: pid 17"."""
        told = []
        for slot in self.slots:
            file = self._lock(slot)
            if file is not None:
                file.close()
                continue
            with contextlib.suppress(OSError):
                told.append(f"{slot.name}: {(self._folder / f'{slot.name}.lock').read_text(encoding='utf-8').strip()}")
        return told

    def _lock(self, slot: Slot) -> IO[str] | None:
        file = (self._folder / f"{slot.name}.lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()}\n")
        file.flush()
        return file


def _neighbours(free: Sequence[int], count: int) -> list[int]:
    """The first run of `count` consecutive numbers, else the first `count`; empty where there are fewer."""
    for start in range(len(free) - count + 1):
        if free[start + count - 1] - free[start] == count - 1:
            return list(free[start : start + count])
    return list(free[:count]) if len(free) >= count else []


def wanted(resources: Resources) -> int:
    """The slots that a run takes: a GPU a rank, or its ranks' threads in cores."""
    ranks = resources.ranks or 1
    return ranks if resources.device is Device.cuda else ranks * (resources.threads or 1)


def pool_of(device: Device) -> SlotPool:
    """The slots of one kind on this machine, as this process may see them."""
    if device is Device.cuda:
        return SlotPool([Slot(f"gpu-{one.uuid or one.visible}", one.visible) for one in hardware.visible_gpus()])
    return SlotPool([Slot(f"core{number}") for number in range(hardware.usable_cores())])


def busy_gpus(slots: Sequence[Slot]) -> list[str]:
    """One line for each GPU among the slots on which another's process computes."""
    names = {slot.name for slot in slots}
    return [
        f"GPU {uuid}: process {pid} uses {used}"
        for uuid, pid, used in hardware.gpu_processes()
        if f"gpu-{uuid}" in names
    ]
