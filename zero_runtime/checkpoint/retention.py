"""Lists a folder of checkpoints, finds the newest undamaged one, and deletes those that need not be kept."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zero_runtime.agreement import agree
from zero_runtime.checkpoint.layout import OWNER, step_of, trash_name
from zero_runtime.checkpoint.load import CheckpointReader, verify_together
from zero_runtime.collectives import Collectives
from zero_runtime.errors import CheckpointError
from zero_runtime.process_identity import has_ended, mark, remove_left_behind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the last `keep_last` (None: all), all steps divisible by `keep_every`, and `also`."""

    keep_last: int | None = None
    keep_every: int | None = None
    also: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise CheckpointError(f"checkpoint.{name}: expected at least 1 or null, found {value}")

    def doomed(self, steps: list[int]) -> list[int]:
        """The steps that may be deleted, in order."""
        if self.keep_last is None:
            return []
        old = sorted(steps)[: -self.keep_last]
        return [step for step in old if step not in self.also and (not self.keep_every or step % self.keep_every)]


KEEP_ALL = Retention()


class Skipped(NamedTuple):
    """A folder that is not a usable checkpoint, and the reason."""

    path: Path
    why: str


def committed(root: str | Path) -> dict[int, Path]:
    """Folders of committed checkpoints by step, in order; empty if the root does not exist."""
    found = {step_of(path.name): path for path in _entries(root)}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def torn(root: str | Path) -> list[Skipped]:
    """Saves that were interrupted, or are still being written."""
    why = "not committed: still being written, or its writing was interrupted"
    return [Skipped(path, why) for path in _entries(root) if path.name.endswith(".partial")]


def _entries(root: str | Path) -> list[Path]:
    try:
        return sorted(path for path in Path(root).iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{root}: expected a folder of checkpoints that may be read, found {error.strerror}; mend its rights or "
            "give another"
        ) from error


def newest_good_together(
    collectives: Collectives, root: str | Path, tell: Callable[[Skipped], None] | None = None
) -> CheckpointReader | None:
    """The newest checkpoint whose files match their checksums in every rank's root, or None without any. A collective.

    CheckpointError on every rank if there are checkpoints and none is good: their training would be lost.

    Each file is read by one rank only. Roots may differ, as with checkpoints that are local to a node. `tell` is called
    on rank 0 with each folder that it skips; without `tell`, they are logged.
    """
    skipped = torn(root)
    own = committed(root)
    every = collectives.gather_objects(list(own))
    common = set.intersection(*map(set, every))
    skipped += [Skipped(own[step], "another rank has none of this step") for step in own if step not in common]
    found = None
    for step in sorted(common, reverse=True):
        try:
            found = open_together(collectives, own[step])
            break
        except CheckpointError as error:
            skipped.append(Skipped(own[step], str(error)))
    if collectives.rank == 0:
        for one in skipped:
            (tell or _tell)(one)
    if found is None and any(every):
        steps = sorted(set().union(*every))
        why = skipped[-1].why if skipped else "this rank's folder has none of them"
        raise CheckpointError(
            f"{root}: expected a good checkpoint, found none among those of steps {', '.join(map(str, steps))} "
            f"({why}); bring back a copy of one, or begin anew with checkpoint.resume=none (a script: load "
            "nothing, and save into another folder)"
        )
    return found


def set_aside(root: str | Path, step: int, tell: Callable[[Skipped], None] | None = None) -> None:
    """Rename the checkpoints newer than `step`, from which training goes on, so that no later save deletes them.

    They are damaged or of an abandoned training, would count as the last ones that retention keeps, and would be
    replaced by the saves of their steps. One rank calls it; `tell` is called with each, or they are logged.
    """
    for newer, path in committed(root).items():
        if newer > step:
            aside = path.with_name(f"{path.name}.aside-{uuid.uuid4().hex[:8]}")
            why = f"training goes on from step {step}; kept as {aside.name}: delete it by hand"
            try:
                path.rename(aside)
            except OSError as error:
                why = f"expected to rename it, found {error}; a save of its step will replace it"
            (tell or _tell)(Skipped(path, why))


def open_together(collectives: Collectives, path: str | Path) -> CheckpointReader:
    """Open and verify a checkpoint on all ranks, reading each file once. A collective.

    Raises the same CheckpointError on every rank.
    """
    checkpoint, trouble = None, None
    try:
        checkpoint = CheckpointReader.open(path, verify=False)
    except CheckpointError as error:
        trouble = str(error)
    agree(collectives, trouble)
    assert checkpoint is not None
    verify_together(collectives, checkpoint)
    return checkpoint


def _tell(one: Skipped) -> None:
    logger.warning("passed over %s: %s", one.path, one.why)


def prune(root: str | Path, retention: Retention) -> list[Path]:
    """Delete the checkpoints that need not be kept, and return their folders.

    Each is renamed before it is deleted, so that a partly deleted folder never looks like a checkpoint. A folder that
    cannot be deleted is left, with a warning.
    """
    found = committed(root)
    gone = []
    for step in retention.doomed(list(found)):
        trash = trash_path(root, step)
        try:
            found[step].rename(trash)
            shutil.rmtree(trash)
            gone.append(found[step])
        except OSError as error:
            logger.warning("%s: expected to delete it, found %s; delete it by hand", found[step], error)
    return gone


def trash_path(root: str | Path, step: int) -> Path:
    """A new path for a checkpoint that this process is about to delete."""
    return Path(root) / trash_name(step, f"{mark()}-{uuid.uuid4().hex[:8]}")


def clear_leftovers(root: str | Path) -> list[Path]:
    """Remove the folders of saves and deletions that ended processes left incomplete; returns the removed folders."""
    trash = [path for path in _entries(root) if path.name.startswith(".trash-")]
    gone = remove_left_behind(trash)
    for path in (one.path for one in torn(root)):
        if has_ended(owner_of(path)):
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
    return gone


def owner_of(partial: Path) -> str:
    """The mark of the process that leads a save; empty if it is unknown."""
    try:
        return (partial / OWNER).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
