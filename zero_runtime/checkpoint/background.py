"""Writes checkpoints behind training: a copy in memory, then a thread on each rank that writes it."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.checkpoint.save import Save, SaveSettings, begin
from zero_runtime.checkpoint.snapshot import LateValues, Snapshot
from zero_runtime.runtime import ZeroRuntime


class Stall(NamedTuple):
    """Where the time of one call of `save` went: for the save before it, for the other ranks, for the copy."""

    waited_s: float
    agreed_s: float
    copied_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


class BackgroundSaver:
    """Saves one after another into `root`. Its threads issue no collectives; `save` and `wait` are collectives.

    A save that failed on any rank is raised by the next `save` or `wait` on every rank, and only once. Memory beside
    the run: one copy of this rank's parts on the host, kept between saves.
    """

    def __init__(self, root: str | Path, settings: SaveSettings | None = None) -> None:
        self.root = Path(root)
        self.settings = settings or SaveSettings()
        self.last_stall = Stall(0.0, 0.0, 0.0)
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._trouble: str | None = None

    @property
    def stall_s(self) -> float:
        """How long the last `save` held training up."""
        return self.last_stall.total_s

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, runtime: ZeroRuntime, *, step: int, trainer: dict[str, Any]) -> Path:
        """Copy the state and return, having waited for the save before; the result is where it will be."""
        times = [time.monotonic()]
        self._join()
        times.append(time.monotonic())
        trouble, self._trouble = self._trouble, None
        save = begin(runtime, self.root, step=step, trainer=trainer, settings=self.settings, trouble=trouble)
        times.append(time.monotonic())
        if any(isinstance(part.values, LateValues) and part.values.rest for part in save.parts):
            # The next step overwrites the file that they rest in, and memory for a copy of them is what there is none
            # of: they are written before training goes on.
            self._run(save)
            times.append(time.monotonic())
            self.last_stall = Stall(*(end - start for start, end in pairwise(times)))
            return save.final
        save.parts = self._snapshot.copy(save.parts)
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint-writer")
        self._thread.start()
        times.append(time.monotonic())
        self.last_stall = Stall(*(end - start for start, end in pairwise(times)))
        return save.final

    def wait(self, runtime: ZeroRuntime) -> None:
        """Block until the last save is committed on every rank; raises what went wrong with it."""
        self._join()
        trouble, self._trouble = self._trouble, None
        agree(runtime.collectives, trouble)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, save: Save) -> None:
        try:
            # The leader goes on after a failure of its own: it waits for the others, then removes what was written.
            self._trouble = trouble_of(save.write)
            self._trouble = trouble_of(save.commit) or self._trouble
        except BaseException as error:  # nobody would see it otherwise
            self._trouble = f"{save.final}: the writer failed: {type(error).__name__}: {error}"
