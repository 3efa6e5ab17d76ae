"""Writes rank 0's events in order; on a GPU from a thread, because all ranks would wait for a slow disk."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from orchestrator.records.record_file import EventAppender

LAST_S = 10.0  # how long a rank that failed waits for its last events to be written


class EventWriter:
    """Appends events to a file. On a CPU each is written before `write` returns.

    An OSError of a write is raised by that call, or with a thread by the next one, so that a full disk ends the run.
    """

    def __init__(self, path: Path, *, in_background: bool) -> None:
        self._file = EventAppender(path)
        self._thread = ThreadPoolExecutor(1, "events") if in_background else None
        self._pending: deque[Future[None]] = deque()

    def write(self, event: str, **values: Any) -> None:
        """Appends an event with the current time."""
        line = {"event": event, "time": time.time(), **values}
        if self._thread is None:
            self._file.append(line)
            return
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._file.append, line))

    def flush(self) -> None:
        """Returns when all events are written."""
        while self._pending:
            self._pending.popleft().result()

    def end(self) -> None:
        """Waits for the events of a rank that ends, however it ends: at most LAST_S, and without an error."""
        wait(self._pending, LAST_S)
        if not self._pending or self._pending[-1].done():
            self._file.close()
