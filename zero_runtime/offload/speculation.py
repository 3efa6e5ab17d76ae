"""The speculative update of a step: it writes second copies in the scratch file while backward still runs.

See [Note: guessing] in host.py. Here the second copy is at a second offset in the file, and a guess that was right
swaps the two offsets. New parameters that are not stored in the file go to a separate buffer, since backward may still
read the old ones.
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
    """A gradient has not arrived and will not arrive."""


class Guess:
    """Updates each record in order, once its gradient has arrived, and writes the result to its second offset."""

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
        """Report that the unit's gradient is complete."""
        if record.name in self._arrived:
            self._arrived[record.name].set()

    def end(self) -> bool:
        """Block until the update has ended; False if gradients are missing. Raises OffloadError if it failed."""
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
