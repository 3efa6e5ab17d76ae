"""Scratch files that are as slow as allowed: a read or write runs only when it is waited for.

Code that uses a buffer before its read has ended computes with NaN; code that changes a buffer before its write has
ended writes other bytes than it meant to; and a transfer that overlaps another one under way, in the file or in memory,
raises immediately. No clock is involved: a transfer runs either as late as possible or at its start (see ORDERS).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from zero_runtime.offload.scratch_file import ScratchFile, Transfer

POISON = 0xFF  # four such bytes are NaN in fp32, two are NaN in bf16 and fp16
ORDERS: dict[str, Callable[[bool, random.Random], bool]] = {
    "all late": lambda writes, _: True,
    "reads late": lambda writes, _: not writes,
    "writes late": lambda writes, _: writes,
    "some late": lambda _, draw: draw.random() < 0.5,
}


class LateTransfer(Transfer):
    """A transfer of bytes [start, stop) of a file from or to a tensor, made by the first call of `wait` or `settle`."""

    def __init__(self, drive: LateDrive, file: ScratchFile, start: int, tensor: torch.Tensor, writes: bool) -> None:
        super().__init__([])
        self.file, self.start, self.stop, self.writes = file, start, start + tensor.nbytes, writes
        self.tensor = tensor  # kept alive, like the buffer of a real transfer
        self.low, self.high = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        self._drive = drive
        self._lock = threading.Lock()
        self._moved = False
        self._error: Exception | None = None

    def wait(self) -> None:
        self.settle()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        self.move()
        self._drive.ended(self)

    def move(self) -> None:
        with self._lock:
            if self._moved:
                return
            self._moved = True
            try:
                self._drive.move(self)
            except Exception as error:
                self._error = error

    def disturbs(self, other: LateTransfer) -> str | None:
        """Where two transfers that are under way together conflict; None if they do not."""
        if not (self.writes or other.writes) or self.file is not other.file:
            in_file = False
        else:
            in_file = self.start < other.stop and other.start < self.stop
        in_memory = not (self.writes and other.writes) and self.low < other.high and other.low < self.high
        return "in the file" if in_file else "in memory" if in_memory else None

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} of bytes {self.start} to {self.stop}"


class LateDrive:
    """The late transfers of all scratch files of this process, inside `late_scratch`.

    late: given whether a transfer writes, returns whether it runs only when waited for. gate: called before any
        transfer moves its bytes.
    """

    def __init__(self, late: Callable[[bool], bool], gate: Callable[[], None]) -> None:
        self._late, self._gate = late, gate
        self._really = (ScratchFile.read, ScratchFile.write)
        self._under_way: list[LateTransfer] = []
        self._lock = threading.Lock()
        self.late_reads = self.late_writes = 0

    def start(self, file: ScratchFile, offset: int, tensor: torch.Tensor, *, writes: bool) -> Transfer:
        transfer = LateTransfer(self, file, offset, tensor, writes)
        with self._lock:
            for other in self._under_way:
                where = transfer.disturbs(other)
                assert where is None, f"{transfer} begins while a {other} is under way {where}"
            self._under_way.append(transfer)
        if not writes:
            tensor.fill_(POISON)
        if self._late(writes):
            self.late_writes += writes
            self.late_reads += not writes
        else:
            transfer.move()
        return transfer

    def move(self, transfer: LateTransfer) -> None:
        self._gate()
        really = self._really[transfer.writes]
        really(transfer.file, transfer.start, transfer.tensor, "a late unit").wait()

    def ended(self, transfer: LateTransfer) -> None:
        with self._lock, suppress(ValueError):  # another caller has waited too
            self._under_way.remove(transfer)


@contextmanager
def late_scratch(order: str, gate: Callable[[], None] = lambda: None) -> Iterator[LateDrive]:
    """Inside the context every scratch file of this process is slow. `order`: a key of ORDERS."""
    chooses, draw = ORDERS[order], random.Random(order)
    drive = LateDrive(lambda writes: chooses(writes, draw), gate)
    read, write = ScratchFile.read, ScratchFile.write
    ScratchFile.read = lambda self, offset, target, what: drive.start(self, offset, target, writes=False)  # type: ignore
    ScratchFile.write = lambda self, offset, source, what: drive.start(self, offset, source, writes=True)  # type: ignore
    try:
        yield drive
    finally:
        ScratchFile.read, ScratchFile.write = read, write  # type: ignore[method-assign]
