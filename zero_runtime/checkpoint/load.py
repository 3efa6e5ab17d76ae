"""Loading: a checkpoint as a source of tensors, and a runtime of any plan, world and precision filled from a source.

Everything that can be known without reading a tensor is compared before the first one is read, so a checkpoint that
does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zero_runtime.checkpoint.files import DTYPE_OF, Place, crc32_of, read_header, read_range
from zero_runtime.checkpoint.layout import KEY, Index, folder_of
from zero_runtime.checkpoint.rng import set_rng_state
from zero_runtime.checkpoint.shelf import steps_in
from zero_runtime.checkpoint.snapshot import states_of
from zero_runtime.checkpoint.source import MASTER, TensorSource
from zero_runtime.collectives import Collectives
from zero_runtime.errors import CheckpointError
from zero_runtime.runtime import ZeroRuntime

FEW = 4  # differences that an error names


@dataclass
class Checkpoint:
    """A whole checkpoint; a TensorSource. Reading counts its bytes."""

    path: Path
    index: Index
    bytes_read: int = 0
    _places: dict[str, dict[str, Place]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the index and see that every file is there with its size. `verify` reads the files themselves."""
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: expected the folder of a checkpoint, found none; give another path")
        checkpoint = cls(path, Index.read(path))
        for name, entry in checkpoint.index.files.items():
            file = path / name
            if not file.is_file():
                raise CheckpointError(
                    f"{file}: expected this file of the checkpoint, found none; take another checkpoint"
                )
            found = file.stat().st_size
            if found != entry.bytes:
                raise CheckpointError(
                    f"{file}: expected {entry.bytes:,} bytes, found {found:,}: it was cut off; take another checkpoint"
                )
        return checkpoint

    @property
    def trainer(self) -> dict[str, Any]:
        """What the one who saved gave beside the runtime."""
        return self.index.trainer

    @property
    def tied(self) -> dict[str, str]:
        """Other names of parameters, to the names that they go by here."""
        return self.index.tied

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Read these files (None: all) and compare their checksums; CheckpointError names a damaged one."""
        for name in self.index.files if files is None else files:
            entry = self.index.files[name]
            try:
                found = crc32_of(self.path / name)
            except OSError as error:
                raise CheckpointError(f"{self.path / name}: could not be read: {error}") from error
            if found != entry.crc32:
                raise CheckpointError(
                    f"{self.path / name}: expected the checksum {entry.crc32:08x}, found {found:08x}: its bytes have "
                    "changed since it was written; take another checkpoint"
                )

    def states(self) -> tuple[str, ...]:
        return (MASTER, *self.index.optimizer["states"])

    def names(self) -> tuple[str, ...]:
        return tuple(self.index.parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.index.parameters[name].shape

    def dtype(self, name: str, state: str = MASTER) -> torch.dtype:
        return DTYPE_OF[self.index.parameters[name].dtypes[state]]

    def read(self, name: str, state: str, start: int, stop: int) -> torch.Tensor:
        key = KEY.format(state=state, name=name)
        values = torch.empty(stop - start, dtype=self.dtype(name, state))
        missing = stop - start
        for file, entry in self.index.files.items():
            if key not in entry.slices:
                continue
            low, high = entry.slices[key]
            first, last = max(low, start), min(high, stop)
            if first < last:
                part = read_range(self.path / file, self._place(file, key), first - low, last - low)
                values[first - start : last - start] = part
                self.bytes_read += part.nbytes
                missing -= last - first
        assert not missing, f"{self.path}: {missing} elements of {key} are not there; was `missing` asked?"
        return values

    def missing(self, name: str, state: str, start: int, stop: int) -> int:
        """How many of these elements no file here has."""
        key = KEY.format(state=state, name=name)
        held = [entry.slices[key] for entry in self.index.files.values() if key in entry.slices]
        return stop - start - sum(max(min(high, stop) - max(low, start), 0) for low, high in held)

    def _place(self, file: str, key: str) -> Place:
        if file not in self._places:
            self._places[file] = read_header(self.path / file)
        return self._places[file][key]


def newest_good(root: str | Path, collectives: Collectives) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint in `root` that is whole and undamaged on every rank, and why newer ones are not taken.

    Every rank must call it. Each reads its share of the files; where nodes have roots of their own, its node's.
    """
    root = Path(root)
    skipped: list[str] = []
    common = set.intersection(*map(set, collectives.gather_objects(steps_in(root))))
    for step in sorted(common, reverse=True):
        checkpoint, trouble = _opened(folder_of(root, step), collectives)
        if trouble is None:
            return checkpoint, skipped
        skipped.append(trouble)
    return None, skipped


def open_verified(path: str | Path, collectives: Collectives) -> Checkpoint:
    """This checkpoint, its files verified by the ranks together. Every rank must call it and every one raises alike."""
    checkpoint, trouble = _opened(Path(path), collectives)
    if checkpoint is None or trouble is not None:
        raise CheckpointError(trouble)
    return checkpoint


def _opened(folder: Path, collectives: Collectives) -> tuple[Checkpoint | None, str | None]:
    """The checkpoint on this rank, and the first trouble that any rank has with it."""
    checkpoint, trouble = None, None
    try:
        checkpoint = Checkpoint.open(folder)
        checkpoint.verify(_share(checkpoint, collectives))
    except CheckpointError as error:
        trouble = str(error)
    troubles = [one for one in collectives.gather_objects(trouble) if one is not None]
    return checkpoint, troubles[0] if troubles else None


def _share(checkpoint: Checkpoint, collectives: Collectives) -> list[str]:
    """The files that this rank verifies: together the ranks read each once, a file of a node by its own rank."""
    files = sorted(checkpoint.index.files)
    if len(files) < checkpoint.index.world:  # of one node
        return files[collectives.rank % len(files) :: len(files)]
    return files[collectives.rank :: collectives.world]


def load_checkpoint(runtime: ZeroRuntime, checkpoint: Checkpoint) -> dict[str, Any]:
    """Go on from a checkpoint, at whatever plan, world, unit size and precision; returns what its trainer saved.

    Every rank must call it. Random generators go on where the world is the same.
    """
    index = checkpoint.index
    own, saved = runtime.optimizer.config.name, index.optimizer["name"]
    if own != saved:
        raise CheckpointError(
            f"{checkpoint.path}: expected the states of {own}, found those of {saved}; train with {saved}, or take the "
            "weights alone (load_weights)"
        )
    compare(runtime, checkpoint, states=True)
    _check_coverage(runtime, checkpoint)
    fill_runtime(runtime, checkpoint)
    runtime.optimizer.load_counters(index.optimizer["counters"])
    if runtime.scaler.rule.static is None:
        runtime.scaler = replace(runtime.scaler, **index.runtime["loss_scaler"])
    rng = index.runtime["rng"].get(str(runtime.collectives.rank))
    if index.world == runtime.collectives.world and rng is not None:
        set_rng_state(rng, runtime.device)
    return index.trainer


def _check_coverage(runtime: ZeroRuntime, checkpoint: Checkpoint) -> None:
    """CheckpointError on every rank where a rank needs what its folder does not have."""
    absent = [
        f"{state} of {piece.name}"
        for unit in runtime.units
        for state in states_of(runtime, unit)
        for piece in unit.layout.pieces(runtime.collectives.shard_rank)
        if checkpoint.missing(piece.name, state, piece.start, piece.stop)
    ]
    everyone = runtime.collectives.gather_objects(absent[:FEW])
    for rank, some in enumerate(everyone):
        if some:
            raise CheckpointError(
                f"{checkpoint.path}: expected all that rank {rank} needs, found parts of {', '.join(some)} missing: "
                "the folder holds the files of some nodes alone; load at the setting that saved it"
            )


def load_weights(runtime: ZeroRuntime, source: TensorSource) -> None:
    """Take the weights alone; the optimizer starts anew."""
    fill_runtime(runtime, source, states=False)


def fill_runtime(runtime: ZeroRuntime, source: TensorSource, *, states: bool = True) -> None:
    """Fill this rank's shards from `source`, reading only the ranges that they hold. Every rank must call it.

    With `states` the optimizer's too. CheckpointError before anything is changed where names, shapes or states differ.
    """
    compare(runtime, source, states=states)
    with torch.no_grad():
        for unit in runtime.units:
            for state, shard in states_of(runtime, unit).items():
                if state != MASTER and not states:
                    continue
                for piece in unit.layout.pieces(runtime.collectives.shard_rank):
                    part = shard[piece.shard_offset :][: piece.stop - piece.start]
                    part.copy_(source.read(piece.name, state, piece.start, piece.stop))
            unit.shards_changed()


def compare(runtime: ZeroRuntime, source: TensorSource, *, states: bool) -> None:
    """CheckpointError with the first differences between what the runtime trains and what the source holds."""
    own = {segment.name: segment.shape for unit in runtime.units for segment in unit.layout.segments}
    there = set(source.names())
    troubles = []
    if missing := sorted(set(own) - there):
        troubles.append(f"the model's {_few(missing)} not in it")
    if more := sorted(there - set(own)):
        troubles.append(f"its {_few(more)} not in the model")
    shapes = [
        f"{name}: the model has {list(shape)}, it has {list(source.shape(name))}"
        for name, shape in own.items()
        if name in there and tuple(source.shape(name)) != tuple(shape)
    ]
    troubles += shapes[:FEW] + ([f"and {len(shapes) - FEW} more shapes"] if len(shapes) > FEW else [])
    wanted = set(runtime.optimizer.state_names) if states else set()
    if absent := sorted(wanted - set(source.states())):
        troubles.append(f"the optimizer's {_few(absent)} not in it")
    if troubles:
        name = getattr(source, "path", type(source).__name__)
        raise CheckpointError(
            f"{name}: expected the parameters of this model, found others; give the model that was saved\n  "
            + "\n  ".join(troubles)
        )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more are" if len(names) > FEW else " is" if len(names) == 1 else " are"
    return ", ".join(names[:FEW]) + more
