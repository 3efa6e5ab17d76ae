"""Which collectives a device has completed, for a rank whose backend's `wait` does not block the host.

NCCL's `wait` makes a stream wait and returns, so a host that has issued everything looks idle while its device hangs in
a collective. The device is asked only if the host makes no progress.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from zero_runtime.watch.journal import Journal

KEPT = 64  # the last collectives; a device is behind its host by fewer


class UnderWay(NamedTuple):
    """A collective, by its number in the journal, and the backend's answer to whether the device has completed it."""

    sequence: int
    is_completed: Callable[[], bool]


class DeviceProgress:
    """The last collectives that this rank's device may not have completed, in the order of their issue."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._under_way: deque[UnderWay] = deque(maxlen=KEPT)

    def add(self, sequence: int, is_completed: Callable[[], bool]) -> None:
        """Called by the working thread after the issue of a collective."""
        # A work object holds the collective's output, so only those are added whose output is small or lives longer
        # than the collective: control messages, and gathers into the units' own tensors. That is enough to see a hang
        # in any collective, because the compute stream waits for each of them before a later one starts.
        with self._lock:
            self._under_way.append(UnderWay(sequence, is_completed))

    def forget(self) -> None:
        """Keep no collective any more: their groups are about to be destroyed."""
        with self._lock:
            self._under_way.clear()

    def poll(self) -> bool:
        """Ask the device and write the answer into the journal; returns whether it has completed any since the last
        poll. Called by the watching thread."""
        completed, first = 0, None
        with self._lock:
            kept = list(self._under_way)
        for one in kept:
            if not one.is_completed():
                first = one.sequence
                break
            completed = one.sequence
        with self._lock:
            while self._under_way and self._under_way[0].sequence <= completed:
                self._under_way.popleft()
        if kept:
            self._journal.see_device(completed, first or 0)
        return completed > 0
