"""Writes a checkpoint: every rank writes its own file in parallel, then one rank commits them all.

1. `begin` (all ranks, collective): ranks exchange counters, random states and errors; the leader of each folder
   creates an empty `.step-….partial`, removing one that an interrupted save left.
2. `Save.write` (each rank, any thread, no collective): writes the rank's tensors into its file, calls fsync, then
   writes a report with its pieces and checksum next to it. A rank that fails removes its file and reports the reason.
3. `Save.commit` (the leader, any thread, no collective): waits for the reports, writes the index, calls fsync and
   renames the folder. The rename is the commit. If a report describes a failure or does not arrive, the leader removes
   the partial folder.
`save_checkpoint` runs 2 and 3 immediately and reports the outcome to all ranks; `BackgroundSaver` runs them in a
thread.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero_runtime.agreement import agree, raise_for, trouble_of
from zero_runtime.checkpoint.layout import (
    BUFFER,
    INDEX,
    OWNER,
    Extent,
    FileEntry,
    Index,
    partial_name,
    rank_file,
    report_file,
    step_name,
    tensor_key,
)
from zero_runtime.checkpoint.retention import KEEP_ALL, Retention, clear_leftovers, prune, trash_path
from zero_runtime.checkpoint.rng import random_states
from zero_runtime.checkpoint.snapshot import StatePart, index_without_files, parts_of
from zero_runtime.checkpoint.tensor_file import fsync_folder, write_tensor_file
from zero_runtime.errors import CheckpointError
from zero_runtime.process_identity import mark
from zero_runtime.runtime import ZeroRuntime

_POLL_S = 0.01


@dataclass(frozen=True)
class SaveSettings:
    """How checkpoints are written.

    node: None if all ranks see the same folder. Otherwise the number of this rank's node: the ranks of one node share
        a separate root, which holds only their files.
    retention: which checkpoints are deleted after each commit.
    with_frozen: False leaves frozen parameters out, for models whose frozen base is stored elsewhere (LoRA).
    limit_s: the save fails if ranks have not reported and the folder has not grown for this many seconds.
    block_bytes: bytes per write call.
    within_step: the save may come between the backwards of a step, whose gradients it leaves out.
    """

    node: int | None = None
    retention: Retention = KEEP_ALL
    with_frozen: bool = True
    limit_s: float = 300.0
    block_bytes: int = 8 << 20
    within_step: bool = False

    def __post_init__(self) -> None:
        if self.node is not None and self.retention.keep_last == 1:
            raise CheckpointError(
                "checkpoint.keep_last: expected at least 2 where each node keeps its own files, found 1: a node that "
                "fails in a save would leave no step that all have; keep 2"
            )


def save_checkpoint(
    runtime: ZeroRuntime,
    root: str | Path,
    *,
    step: int,
    trainer: dict[str, Any],
    settings: SaveSettings | None = None,
) -> Path:
    """Write and commit a checkpoint, and return its folder. Every rank calls it, between two steps or `within_step`.

    `trainer`: plain JSON values, which `load_checkpoint` returns. Raises CheckpointError, the same on every rank;
    earlier checkpoints are then left as they were.
    """
    save = begin(runtime, Path(root), step=step, trainer=trainer, settings=settings or SaveSettings())
    try:
        agree(runtime.collectives, trouble_of(save.write))
    except CheckpointError:
        save.discard()
        raise
    agree(runtime.collectives, trouble_of(save.commit))
    return save.final


def begin(
    runtime: ZeroRuntime,
    root: Path,
    *,
    step: int,
    trainer: dict[str, Any],
    settings: SaveSettings,
    trouble: str | None = None,
) -> Save:
    """Agree on a save: the first of its three parts, and the only one with collectives.

    `trouble`: the error of this rank's previous save, if any; raised here on every rank.
    """
    (runtime.check_weights if settings.within_step else runtime.check_between_steps)("save_checkpoint")
    collectives = runtime.collectives
    own = {
        "trouble": trouble,
        "step": step,
        "node": settings.node,
        "counters": runtime.optimizer.counters(),
        "rng": random_states(runtime.device),
    }
    every = collectives.gather_objects(own)
    # The error of a previous background save is raised on every rank before a new save begins.
    raise_for([one["trouble"] for one in every])
    if len({one["step"] for one in every}) > 1:
        raise CheckpointError(f"expected every rank to save one step, found {[one['step'] for one in every]}")
    members = [rank for rank, one in enumerate(every) if one["node"] == settings.node]
    save = Save(root, step, collectives.rank, collectives.world, members, settings)
    trouble = trouble_of(lambda: save.prepare(runtime, every, trainer))
    # Members take their leader's token, so that the leader ignores reports that an earlier attempt left.
    tokens = collectives.gather_objects((trouble, save.token))
    try:
        raise_for([one for one, _ in tokens])
    except CheckpointError:
        save.discard()
        raise
    save.token = tokens[members[0]][1]
    return save


@dataclass
class Save:
    """One rank's share of one save. `members`: the ranks that write to this folder; the first is the leader."""

    root: Path
    step: int
    rank: int
    world: int
    members: Sequence[int]
    settings: SaveSettings
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    parts: list[StatePart] = field(default_factory=list)
    draft: Index | None = None  # only on the leader: the index without pieces and files

    @property
    def leads(self) -> bool:
        return self.rank == self.members[0]

    @property
    def final(self) -> Path:
        return self.root / step_name(self.step)

    @property
    def partial(self) -> Path:
        return self.root / partial_name(self.step)

    def prepare(self, runtime: ZeroRuntime, every: Sequence[dict[str, Any]], trainer: dict[str, Any]) -> None:
        """Collect the parts to write; the leader also creates the partial folder."""
        self.parts = parts_of(runtime, self.members, with_frozen=self.settings.with_frozen)
        if not self.leads:
            return
        self.draft = index_without_files(runtime, self.step, trainer, every, self.members)
        self.draft.to_text()  # raises for values that JSON cannot hold, before anything is written
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if self.partial.exists():
                shutil.rmtree(self.partial)  # left by an interrupted save
            clear_leftovers(self.root)
            self.partial.mkdir()
            (self.partial / OWNER).write_text(mark(), encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error

    # ---- each rank -------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write this rank's file and report, with fsync. CheckpointError if a write fails; the report records that."""
        path = self.partial / rank_file(self.rank, self.world)
        try:
            tensors = {tensor_key(part.state, part.name): part.values for part in self.parts}
            metadata = {"format": "zero-lab", "step": str(self.step), "rank": str(self.rank), "world": str(self.world)}
            entry = write_tensor_file(path, tensors, metadata, block_bytes=self.settings.block_bytes)
            self._report({"file": entry._asdict(), "pieces": [part[:4] for part in self.parts]})
        except OSError as error:
            trouble = self._unwritable(error)
            trouble_of(lambda: path.unlink(missing_ok=True))  # on a full disk, this makes room for the report
            trouble_of(lambda: self._report({"trouble": str(trouble)}))
            raise trouble from error
        finally:
            self.parts = []

    def _report(self, found: dict[str, Any]) -> None:
        path = self.partial / report_file(self.rank, self.world)
        self._write_text(path.with_suffix(".part"), json.dumps({"token": self.token, **found}))
        path.with_suffix(".part").rename(path)

    def _write_text(self, path: Path, text: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _unwritable(self, error: OSError) -> CheckpointError:
        more = "" if self.settings.node is None else ", give each node a folder on its own disk"
        return CheckpointError(
            f"{self.final}: expected to write it, found {error.strerror or error} "
            f"({Path(error.filename or self.partial).name}); earlier checkpoints are untouched: make room or mend the "
            f"rights{more}, and save again"
        )

    # ---- the leader ------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the files of all members; a no-op unless this rank leads. A failure removes the partial folder."""
        if not self.leads:
            return
        try:
            reports = self._await_reports()
            troubles = [report["trouble"] for report in reports.values() if "trouble" in report]
            if troubles:
                raise CheckpointError(troubles[0])
            self._write_text(self.partial / INDEX, self._index(reports).to_text())
            for rank in self.members:
                (self.partial / report_file(rank, self.world)).unlink()
            (self.partial / OWNER).unlink()
            fsync_folder(self.partial)  # before the rename: a committed folder must not lose entries in a crash
            self._rename()
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise self._unwritable(error) from error
            raise
        prune(self.root, self.settings.retention)

    def _rename(self) -> None:
        """Commit by renaming the folder.

        An existing folder of the same step is damaged or is being saved again: it is moved away and deleted.
        """
        trash = trash_path(self.root, self.step)
        if self.final.exists():
            self.final.rename(trash)
        self.partial.rename(self.final)
        fsync_folder(self.root)
        shutil.rmtree(trash, ignore_errors=True)

    def _await_reports(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        size, grown = -1, time.monotonic()
        while True:
            for rank in self.members:
                if rank not in found:
                    report = self._read_report(rank)
                    if report is not None:
                        found[rank] = report
            missing = [rank for rank in self.members if rank not in found]
            if not missing:
                return found
            now = _bytes_in(self.partial)
            if now != size:
                size, grown = now, time.monotonic()
            if time.monotonic() - grown > self.settings.limit_s:
                raise CheckpointError(
                    f"{self.final}: expected the files of ranks {missing}, found none that is finished, and nothing "
                    f"written for {self.settings.limit_s:g} s; earlier checkpoints are untouched: see why those ranks "
                    "stopped, and that all write to the same folder"
                )
            time.sleep(_POLL_S)

    def _read_report(self, rank: int) -> dict[str, Any] | None:
        try:
            found = json.loads((self.partial / report_file(rank, self.world)).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found if found["token"] == self.token else None

    def _index(self, reports: dict[int, dict[str, Any]]) -> Index:
        assert self.draft is not None
        files: dict[str, FileEntry] = {}
        pieces: dict[str, dict[str, list[Extent]]] = {name: {} for name in self.draft.parameters}
        for rank in self.members:
            name = rank_file(rank, self.world)
            files[name] = FileEntry(**reports[rank]["file"])
            for state, param, start, stop in reports[rank]["pieces"]:
                if state != BUFFER:
                    pieces[param].setdefault(state, []).append(Extent(name, start, stop))
        leader = rank_file(self.members[0], self.world)
        return replace(
            self.draft,
            files=files,
            parameters={
                name: replace(
                    entry,
                    pieces={
                        state: tuple(sorted(found, key=lambda one: one.start)) for state, found in pieces[name].items()
                    },
                )
                for name, entry in self.draft.parameters.items()
            },
            buffers={name: entry._replace(file=leader) for name, entry in self.draft.buffers.items()},
        )

    def discard(self) -> None:
        """Remove the partial folder; a no-op unless this rank leads."""
        if self.leads:
            shutil.rmtree(self.partial, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    """Bytes of a folder's files. Other processes may write and rename files there meanwhile."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
