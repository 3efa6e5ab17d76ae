"""A folder of checkpoints: which are there, which stay, and how one goes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from zero_runtime.checkpoint.layout import folder_of, step_of

_TRASH = ".trash-"


@dataclass(frozen=True)
class Retention:
    """The last `keep_last` checkpoints stay (None: all), and those of steps that `keep_every` divides."""

    keep_last: int | None = None
    keep_every: int | None = None

    def goes(self, steps: list[int]) -> list[int]:
        """Which of these steps are to be removed."""
        if self.keep_last is None:
            return []
        old = sorted(steps)[: -self.keep_last]
        return [step for step in old if not self.keep_every or step % self.keep_every]


def steps_in(root: Path) -> list[int]:
    """The steps of the whole checkpoints in this folder, the newest first; none where there is no such folder."""
    folders = root.iterdir() if root.is_dir() else ()
    return sorted((step for step in map(step_of, folders) if step is not None), reverse=True)


def remove(folder: Path) -> None:
    """At once for every reader: the name goes before the files do."""
    trash = folder.with_name(f"{_TRASH}{folder.name}.{os.getpid()}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def retain(root: Path, retention: Retention) -> None:
    for step in retention.goes(steps_in(root)):
        remove(folder_of(root, step))


def sweep_leftovers(root: Path) -> None:
    """Remove what a save or a removal left when it was cut off. Nobody may be saving into this folder."""
    for folder in root.glob(".step-*.partial"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in root.glob(f"{_TRASH}*"):
        shutil.rmtree(folder, ignore_errors=True)
