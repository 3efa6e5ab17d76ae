"""Saving: every rank writes its slices in parallel, one of them commits, and training may go on meanwhile.

[Note: how a checkpoint comes to be]
All files are written into `.step-N.partial`. A rank that has its file on the disk leaves a report there; the leader
waits for every report, writes the index and renames the folder. So a folder with a checkpoint's name is whole, and
nothing in the way needs a collective, which a thread beside training must not issue. A rank that cannot write leaves
an empty `.failed` in place of its report, and the leader removes the folder. The next `save` or `wait` tells every
rank.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero_runtime.checkpoint.files import sync_folder, write_slices, write_synced
from zero_runtime.checkpoint.layout import (
    INDEX,
    FileEntry,
    Index,
    failure_of,
    file_of,
    folder_of,
    partial_of,
    report_of,
)
from zero_runtime.checkpoint.shelf import Retention, remove, retain, sweep_leftovers
from zero_runtime.checkpoint.snapshot import Snapshot, take_snapshot
from zero_runtime.errors import CheckpointError
from zero_runtime.runtime import ZeroRuntime

POLL_S = 0.02


@dataclass(frozen=True)
class SaveSettings:
    """retention: what stays. local_ranks: the ranks that share this root; None: all do, else each group of ranks (a
    node) has a root with its own files. limit_s: how long the leader waits for the others' files. pause_s: see
    write_slices.
    """

    retention: Retention = field(default_factory=Retention)
    local_ranks: tuple[int, ...] | None = None
    limit_s: float = 1800.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class _Work:
    """What the thread of one rank has to do; it touches nothing else."""

    root: Path
    step: int
    rank: int
    world: int
    ranks: tuple[int, ...]  # those that write into this root, the leader first
    snapshot: Snapshot
    trainer: dict[str, Any]
    settings: SaveSettings

    @property
    def partial(self) -> Path:
        return partial_of(self.root, self.step)

    def run(self) -> None:
        try:
            entry = write_slices(
                self.partial / file_of(self.rank, self.world), self.snapshot.slices, pause_s=self.settings.pause_s
            )
            write_synced(self.partial / report_of(self.rank), json.dumps({"file": asdict(entry), **self.snapshot.own}))
        except BaseException:
            if self.partial.is_dir():
                (self.partial / failure_of(self.rank)).touch()
            if self.rank == self.ranks[0]:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise
        if self.rank == self.ranks[0]:
            self._commit()

    def _commit(self) -> None:
        try:
            reports = self._reports()
            write_synced(self.partial / INDEX, self._index(reports).to_json())
            for rank in self.ranks:
                (self.partial / report_of(rank)).unlink()
            sync_folder(self.partial)
            final = folder_of(self.root, self.step)
            if final.exists():  # the same step of an earlier try
                remove(final)
            self.partial.rename(final)
            sync_folder(self.root)
        except BaseException:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise
        retain(self.root, self.settings.retention)

    def _reports(self) -> dict[int, dict[str, Any]]:
        """What the ranks of this root report, when all have."""
        deadline = time.monotonic() + self.settings.limit_s
        while True:
            failed = [rank for rank in self.ranks if (self.partial / failure_of(rank)).exists()]
            if failed:
                raise CheckpointError(f"{self.partial}: the files of rank {failed} could not be written")
            missing = [rank for rank in self.ranks if not (self.partial / report_of(rank)).exists()]
            if not missing:
                return {rank: json.loads((self.partial / report_of(rank)).read_text()) for rank in self.ranks}
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.partial}: expected the files of all ranks within {self.settings.limit_s:g} s, found none "
                    f"of rank {missing}; is the folder the same for all ranks?"
                )
            time.sleep(POLL_S)

    def _index(self, reports: dict[int, dict[str, Any]]) -> Index:
        shared = self.snapshot.shared
        counters: dict[str, float] = {}
        for report in reports.values():
            counters |= report["counters"]
        return Index(
            step=self.step,
            world=self.world,
            parameters=shared["parameters"],
            tied=shared["tied"],
            files={file_of(rank, self.world): FileEntry(**report["file"]) for rank, report in reports.items()},
            optimizer={**shared["optimizer"], "counters": counters},
            runtime={
                "loss_scaler": shared["loss_scaler"],
                "rng": {str(rank): report["rng"] for rank, report in reports.items()},
            },
            trainer=self.trainer,
        )


class Saver:
    """Saves a runtime into `root`, one checkpoint at a time. Every rank must call its methods alike.

    stall_s: how long the last `save` kept the caller.
    """

    def __init__(self, root: str | Path, settings: SaveSettings | None = None) -> None:
        self.root = Path(root)
        self.settings = settings or SaveSettings()
        self.stall_s = 0.0
        self._runtime: ZeroRuntime | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._swept = False

    def save(self, runtime: ZeroRuntime, *, step: int, trainer: dict[str, Any], background: bool = True) -> None:
        """Save what `runtime` holds now, and `trainer` (plain data, the same on every rank).

        In the background this returns when the host has a copy; a save that is still under way is waited for first.
        Between backward and step, what is saved is the state before that step: gradients are not.
        """
        start = time.perf_counter()
        self.wait()
        self._runtime = runtime
        ranks = self._ranks(runtime)
        self._agree(self._prepare, step, leads=runtime.collectives.rank == ranks[0])
        work = _Work(
            self.root,
            step,
            runtime.collectives.rank,
            runtime.collectives.world,
            ranks,
            take_snapshot(runtime, copy=background),
            trainer,
            self.settings,
        )
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint")
        self._thread.start()
        if not background:
            self.wait()
        self.stall_s = time.perf_counter() - start

    def wait(self) -> None:
        """Block until the last save is committed; CheckpointError on every rank if any could not do its part."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        self._tell(error)

    def _ranks(self, runtime: ZeroRuntime) -> tuple[int, ...]:
        return self.settings.local_ranks or tuple(range(runtime.collectives.world))

    def _run(self, work: _Work) -> None:
        try:
            work.run()
        except BaseException as error:
            self._error = error

    def _prepare(self, step: int) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            sweep_leftovers(self.root)
        self._swept = True
        partial_of(self.root, step).mkdir()

    def _agree(self, prepare: Any, step: int, *, leads: bool) -> None:
        """The leader makes the folder before anyone writes into it."""
        error: BaseException | None = None
        if leads:
            try:
                prepare(step)
            except OSError as raised:
                error = raised
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        """Every rank's trouble to every rank."""
        assert self._runtime is not None
        text = None if error is None else f"{type(error).__name__}: {error}"
        found = self._runtime.collectives.gather_objects(text)
        troubles = [f"rank {rank}: {one}" for rank, one in enumerate(found) if one is not None]
        if troubles:
            raise CheckpointError(
                f"{self.root}: the checkpoint could not be written, the ones before it are untouched; make room, or "
                "give a folder that all ranks can write to\n" + "\n".join(troubles)
            ) from error


def save_checkpoint(runtime: ZeroRuntime, root: str | Path, *, step: int, trainer: dict[str, Any]) -> Path:
    """Save once and return the checkpoint's folder, when it is on the disk. Every rank must call it."""
    Saver(root).save(runtime, step=step, trainer=trainer, background=False)
    return folder_of(Path(root), step)


def local_group(rank: int, ranks_per_node: int, world: int) -> Sequence[int]:
    """The ranks of this rank's node, where ranks are dealt to nodes in blocks."""
    first = rank // ranks_per_node * ranks_per_node
    return tuple(range(first, min(first + ranks_per_node, world)))
