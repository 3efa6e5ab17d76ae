"""A step's update of second copies in the scratch file, while its backward still runs.

See [Note: guessing] in host.py: here the second copy is a second place in the file, and a guess that was right swaps
the two places. New parameters that do not rest there go to memory of their own, since backward may still read the old.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zero_runtime.errors import OffloadError
from zero_runtime.offload.buffers import Slots
from zero_runtime.offload.file_layout import OffloadedUnit, Visit
from zero_runtime.offload.pipeline import pipeline


class _Cancelled(Exception):
    """A gradient has not come, and none will."""


class Guess:
    """Visits each record when its gradient has come, in this order, and writes what came of it to its other place."""

    def __init__(
        self, slots: Slots, records: Sequence[OffloadedUnit], update: Callable[[Visit], None], *, depth: int
    ) -> None:
        self.records = list(records)
        self._slots = slots
        self._visits = [Visit(record) for record in records]
        self._arrived = {record.name: threading.Event() for record in records}
        self._update = update
        self._cancelled = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scratch-guess")
        self._done: Future[None] = self._thread.submit(
            pipeline,
            self._visits,
            slots.fetch,
            self._try,
            lambda visit: slots.flush(visit, visit.record.other),
            depth=depth,
        )

    def arrived(self, record: OffloadedUnit) -> None:
        """The unit's gradient is complete."""
        if record.name in self._arrived:
            self._arrived[record.name].set()

    def end(self) -> bool:
        """Block until nothing of it is under way; False where gradients are missing. Raises what went wrong."""
        missing = [event for event in self._arrived.values() if not event.is_set()]
        self._cancelled = self._cancelled or bool(missing)
        for event in missing:
            event.set()
        self._thread.shutdown()
        for visit in self._visits:
            self._slots.give_back(visit)
        error = self._done.exception()
        if error is not None and not isinstance(error, _Cancelled):
            raise OffloadError(str(error)) from error
        return not self._cancelled

    def _try(self, visit: Visit) -> None:
        self._arrived[visit.record.name].wait()
        if self._cancelled:
            raise _Cancelled
        with torch.no_grad():
            self._update(visit)
