"""The checkpoints of one run: found, loaded, saved and deleted in one folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.layout import step_name
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.retention import (
    Retention,
    Skipped,
    clear_leftovers,
    newest_good_together,
    open_together,
    set_aside,
)
from zero_runtime.checkpoint.save import SaveSettings
from zero_runtime.runtime import ZeroRuntime


class RunCheckpoints:
    """The checkpoints below `root`. All ranks must make the same calls.

    keep: keep_last and keep_every of Retention. with_frozen: whether frozen parameters are saved. node: see
    SaveSettings.
    """

    def __init__(
        self, runtime: ZeroRuntime, root: Path, *, keep: tuple[int, int | None], with_frozen: bool, node: int | None
    ) -> None:
        self._runtime, self._root = runtime, root
        self._leads = runtime.collectives.rank == (node or 0)
        self._saver = BackgroundSaver(root, SaveSettings(node, Retention(*keep), with_frozen))

    def clear_leftovers(self) -> None:
        """Remove what interrupted saves and deletions left."""
        if self._leads:
            clear_leftovers(self._root)

    def set_aside(self, step: int, tell: Callable[[Skipped], None]) -> None:
        """Rename the checkpoints newer than a step; `tell` is called on rank 0 with each."""
        if self._leads:
            set_aside(self._root, step, tell if self._runtime.collectives.rank == 0 else None)

    def newest_good(self, tell: Callable[[Skipped], None]) -> CheckpointReader | None:
        """The newest undamaged checkpoint of all ranks; `tell` is called on rank 0 with each folder passed over."""
        return newest_good_together(self._runtime.collectives, self._root, tell)

    def open(self, path: str) -> CheckpointReader:
        """A verified checkpoint at any place; CheckpointError on all ranks if it is damaged."""
        return open_together(self._runtime.collectives, path)

    def load(self, checkpoint: CheckpointReader) -> None:
        """Fill the runtime."""
        load_checkpoint(self._runtime, checkpoint)

    def save(self, *, step: int, trainer: dict[str, Any], also: tuple[int, ...]) -> None:
        """Copy the state and begin to write it. also: steps whose checkpoints are kept besides."""
        retention = replace(self._saver.settings.retention, also=also)
        self._saver.settings = replace(self._saver.settings, retention=retention)
        self._saver.save(self._runtime, step=step, trainer=trainer)

    def wait(self) -> None:
        """Block until the last save is on disk on every rank; raises its error if it failed."""
        self._saver.wait(self._runtime)

    def folder_of(self, step: int) -> str:
        """The folder of a step's checkpoint."""
        return str(self._root / step_name(step))
