"""Writes rank 0's events in order; on a GPU from a thread, because all ranks would wait for a slow disk."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from orchestrator.records.record_file import EventAppender

KEEP_S = 0.1  # how long the event of a step may wait for those of the next steps
LATE_S = 1.0  # how often events are written that wait for a step that takes longer, or that never ends
LAST_S = 10.0  # how long a rank that failed waits for its last events to be written


class EventWriter:
    """Appends events to a file. On a CPU each is written before `write` returns, except those of short steps.

    The event of a step that follows the last write within KEEP_S is kept, and written with the next ones. Any other
    event, `flush` and `end` write what is kept first. A process that is killed loses the steps of its last KEEP_S.

    An OSError of a write is raised by that call, or with a thread by the next one, so that a full disk ends the run.
    """

    def __init__(self, path: Path, *, in_background: bool) -> None:
        self._file = EventAppender(path)
        self._thread = ThreadPoolExecutor(1, "events") if in_background else None
        self._pending: deque[Future[None]] = deque()
        self._kept: deque[dict[str, Any]] = deque()
        self._writes = threading.Lock()
        self._written = -KEEP_S  # when the last event was written, on the monotonic clock
        self._late: threading.Thread | None = None
        self._ended = threading.Event()

    def write(self, event: str, **values: Any) -> None:
        """Appends an event with the current time."""
        line = {"event": event, "time": time.time(), **values}
        if self._thread is not None:
            while self._pending and self._pending[0].done():
                self._pending.popleft().result()
            self._pending.append(self._thread.submit(self._file.append, line))
            return
        # A step leaves the caches full of its own data, so that encoding the event that follows it takes several times
        # as long as encoding another one after that (benchmarks/logging_cost.py): those of short steps wait.
        self._kept.append(line)
        if event != "step" or time.monotonic() - self._written >= KEEP_S:
            self._write_kept()
        elif self._late is None:
            self._late = threading.Thread(target=self._write_late, name="late events", daemon=True)
            self._late.start()

    def _write_kept(self) -> None:
        """Writes the kept events. After an OSError the one that failed is still kept, for the next call."""
        with self._writes:
            while self._kept:
                self._file.append(self._kept[0])
                self._kept.popleft()
                self._written = time.monotonic()

    def _write_late(self) -> None:
        # So that a run that hangs shows all its steps.
        while not self._ended.wait(LATE_S):
            with contextlib.suppress(OSError):  # the rank's next write tries again, and raises it
                self._write_kept()

    def flush(self) -> None:
        """Returns when all events are written."""
        self._write_kept()
        while self._pending:
            self._pending.popleft().result()

    def end(self) -> None:
        """Writes the last events of a rank that ends, however it ends, without an error. Waits at most LAST_S for the
        thread of a GPU's events."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._write_kept()
        wait(self._pending, LAST_S)
        if not self._pending or self._pending[-1].done():
            self._file.close()
