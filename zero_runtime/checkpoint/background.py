"""Writes checkpoints in the background: copies the state in memory, then a thread on each rank writes the copy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.checkpoint.save import Save, SaveSettings, begin
from zero_runtime.checkpoint.snapshot import Snapshot
from zero_runtime.checkpoint.tensor_file import LateValues
from zero_runtime.runtime import ZeroRuntime


class BackgroundSaver:
    """Saves checkpoints into `root`, one at a time. `save` and `wait` are collectives; the threads issue none.

    If a save fails on any rank, the next `save` or `wait` raises the error on every rank, once. Extra memory: one copy
    of this rank's parts on the host, kept between saves.
    """

    def __init__(self, root: str | Path, settings: SaveSettings | None = None) -> None:
        self.root = Path(root)
        self.settings = settings or SaveSettings()
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._trouble: str | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, runtime: ZeroRuntime, *, step: int, trainer: dict[str, Any]) -> Path:
        """Wait for the previous save, copy the state, start writing it and return the checkpoint's future folder.

        If part of the state is in a scratch file, the state is written before this returns.
        """
        self._join()
        trouble, self._trouble = self._trouble, None
        save = begin(runtime, self.root, step=step, trainer=trainer, settings=self.settings, trouble=trouble)
        if any(isinstance(part.values, LateValues) and part.values.in_file for part in save.parts):
            # The next step overwrites the scratch file that holds these values. They are in a file because memory is
            # short, so they are not copied, but written before training continues.
            self._run(save)
        else:
            save.parts = self._snapshot.copy(save.parts)
            self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint-writer")
            self._thread.start()
        return save.final

    def wait(self, runtime: ZeroRuntime) -> None:
        """Block until the last save is committed on every rank; raises its error if it failed."""
        self._join()
        trouble, self._trouble = self._trouble, None
        agree(runtime.collectives, trouble)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, save: Save) -> None:
        try:
            # The leader calls commit even if its own write failed: it waits for the others, then removes the folder.
            self._trouble = trouble_of(save.write)
            self._trouble = trouble_of(save.commit) or self._trouble
        except BaseException as error:  # otherwise it would be lost in this thread
            self._trouble = f"{save.final}: the writer failed: {type(error).__name__}: {error}"
