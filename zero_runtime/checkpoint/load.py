"""Opens a committed checkpoint, and fills a runtime of any plan, world, unit size and precision from it.

Before the first byte of the runtime is written, every rank checks that the files are as they were written, that model
and optimizer are those of the runtime, and that every range that this rank needs exists. After that, only an error of
the disk itself can make loading fail.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.checkpoint.compatibility import check_same_model, check_same_optimizer, kept_buffers
from zero_runtime.checkpoint.files import read_small_file
from zero_runtime.checkpoint.layout import BUFFER, INDEX, MASTER, Extent, Index, step_of, tensor_key
from zero_runtime.checkpoint.rng import set_random_states
from zero_runtime.checkpoint.tensor_file import DTYPES, TensorFile, check_file
from zero_runtime.collectives import Collectives
from zero_runtime.errors import CheckpointError
from zero_runtime.flat_layout import READ_NUMEL
from zero_runtime.optim.sharded import ToldState
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.tensor_source import ReadInto, TensorSource, read_in_blocks
from zero_runtime.unit import Unit


class CheckpointReader:
    """A committed checkpoint. Its tensors are read by range, when they are requested."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.index = index
        self.verified = False
        self._files: dict[str, TensorFile] = {}
        self._bytes_read = 0

    @classmethod
    def open(cls, path: str | Path, verify: bool = True) -> CheckpointReader:
        """Open a checkpoint; CheckpointError unless it is complete and readable.

        `verify`: read all files once and compare checksums. Ranks that open one checkpoint together should pass False:
        `load_checkpoint` verifies too, and divides the files among the ranks.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: expected the folder of a checkpoint, found {'a file' if path.exists() else 'nothing'}; "
                "give the path of a step-… folder"
            )
        if path.name.startswith(".") and path.name.endswith(".partial"):
            raise CheckpointError(
                f"{path}: expected a committed checkpoint, found one that is still being written, or whose writing was "
                "interrupted; take the newest step-… folder beside it"
            )
        checkpoint = cls(path, Index.from_bytes(read_small_file(path / INDEX), path / INDEX))
        named = step_of(path.name)
        if named is not None and named != checkpoint.index.step:
            raise CheckpointError(
                f"{path}: expected the checkpoint of step {named}, found one of step {checkpoint.index.step}; the "
                "folder was renamed: give it its own name"
            )
        if verify:
            checkpoint.verify()
        return checkpoint

    def verify(self, place: int = 0, places: int = 1) -> None:
        """Compare size and checksum of the files place, place + places, ... in the order of the index."""
        for name, entry in list(self.index.files.items())[place::places]:
            check_file(self.path / name, entry)
        self.verified = places == 1

    # ---- reading ---------------------------------------------------------------------------------------------------

    def state(self, state: str) -> TensorSource:
        """The source of one state: `master`, or one of `index.optimizer.states`."""
        return StateSource(self, state)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name, each in its shape."""
        found = {}
        for name, entry in self.index.buffers.items():
            values = torch.empty(math.prod(entry.shape), dtype=DTYPES[entry.dtype])
            self._file(entry.file).read_into(tensor_key(BUFFER, name), 0, values)
            found[name] = values.view(entry.shape)
        return found

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read by range so far; bytes read to verify files are not counted."""
        return self._bytes_read + sum(file.bytes_read for file in self._files.values())

    def close(self) -> None:
        """Close the open files; a later read opens them again. Idempotent."""
        for file in self._files.values():
            self._bytes_read += file.bytes_read
            file.close()
        self._files.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.path / name)
        return self._files[name]

    def stored(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where elements [start, stop) of a flattened full parameter are among the elements of its pieces: (element of
        the parameter, element of the pieces, number)."""
        split = self.index.parameters[name].split
        if split is None:
            yield start, start, stop - start
            return
        for span in split.spans_of_full(start, stop):
            yield span.full, span.rank * split.local_numel + span.local, span.numel

    def extents(self, state: str, name: str, start: int, stop: int) -> Sequence[Extent]:
        """The pieces that overlap their elements [start, stop), in order; CheckpointError if some are missing."""
        pieces = self.index.parameters[name].pieces.get(state, ())
        first = max(bisect_right(pieces, start, key=lambda piece: piece.start) - 1, 0)
        found, end = [], start
        for piece in pieces[first:]:
            if piece.start >= stop:
                break
            if piece.start <= end < piece.stop:
                found.append(piece)
                end = piece.stop
        if end < stop:
            raise CheckpointError(
                f"{self.path}: expected elements [{start}, {stop}) of {tensor_key(state, name)}, found none from {end} "
                f"on: it holds what ranks {list(self.index.ranks)} of {self.index.world} wrote on their node; load it "
                "at the same world, plan and place of ranks, or bring the files of all nodes together"
            )
        return found

    def read_into(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D `target` from element `start` of the full parameter on.

        Without a copy if it is on the CPU and in the file's dtype.
        """
        for element, place, numel in self.stored(name, start, start + target.numel()):
            self._read_stored(state, name, place, target[element - start : element - start + numel])

    def _read_stored(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """The same from element `start` of the pieces on."""
        key, stop = tensor_key(state, name), start + target.numel()
        for piece in self.extents(state, name, start, stop):
            file = self._file(piece.file)
            place = file.place(key)
            if place.numel != piece.stop - piece.start:
                raise CheckpointError(
                    f"{self.path / piece.file}: expected {piece.stop - piece.start} elements of {key}, found "
                    f"{place.numel}; the checkpoint is damaged: take another one, or a copy"
                )
            low, high = max(piece.start, start), min(piece.stop, stop)
            part = target[low - start : high - start]
            if part.dtype == place.dtype and part.device.type == "cpu":
                file.read_into(key, low - piece.start, part)
                continue
            for block in part.split(READ_NUMEL):
                values = torch.empty(block.numel(), dtype=place.dtype)
                file.read_into(key, low - piece.start, values)
                block.copy_(values)
                low += block.numel()


class StateSource:
    """One state of a checkpoint as a TensorSource."""

    def __init__(self, checkpoint: CheckpointReader, state: str) -> None:
        self._checkpoint = checkpoint
        self._state = state

    def names(self) -> Sequence[str]:
        index = self._checkpoint.index
        if self._state == MASTER:
            return [name for name, entry in index.parameters.items() if entry.trainable or not entry.left_out]
        trained = ((name, entry) for name, entry in index.parameters.items() if entry.trainable)
        return [name for name, entry in trained if self._state in index.optimizer.states_of(entry)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.index.parameters[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._checkpoint.index.parameters[name].dtype] if self._state == MASTER else torch.float32

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=self.dtype(name))
        self._checkpoint.read_into(self._state, name, start, values)
        return values


# ---- into a runtime ------------------------------------------------------------------------------------------------


def load_checkpoint(runtime: ZeroRuntime, checkpoint: CheckpointReader) -> dict[str, Any]:
    """Fill the runtime; returns the trainer state that was saved. Every rank calls it, between two steps.

    An error is the same on every rank. Random states are restored only if the world
    size is that of the save; otherwise they stay as they are.
    """
    index, collectives = checkpoint.index, runtime.collectives
    runtime.check_between_steps("load_checkpoint")
    # Both before the first byte is written, so that nothing is half-loaded.
    agree(collectives, trouble_of(lambda: _check(runtime, checkpoint)))
    verify_together(collectives, checkpoint)
    agree(collectives, trouble_of(lambda: _fill_all(runtime, checkpoint, (MASTER, *index.optimizer.states))))
    runtime.optimizer.load_counters(index.optimizer.counters)
    _load_scaler(runtime, index.scaler)
    states = index.rng.get(str(collectives.rank))
    if index.world == collectives.world and states is not None:
        set_random_states(states, runtime.device)
    return index.trainer


def load_weights(runtime: ZeroRuntime, checkpoint: CheckpointReader) -> None:
    """Load only the weights and buffers; optimizer, scaler and random states stay as they are. Every rank calls it.

    The checkpoint may have been saved with another optimizer.
    """
    collectives = runtime.collectives
    runtime.check_between_steps("load_weights")
    agree(collectives, trouble_of(lambda: _check(runtime, checkpoint, weights_only=True)))
    verify_together(collectives, checkpoint)
    agree(collectives, trouble_of(lambda: _fill_all(runtime, checkpoint, (MASTER,))))


def verify_together(collectives: Collectives, checkpoint: CheckpointReader) -> None:
    """Verify the files, each on one of the ranks that opened the same folder.

    Raises CheckpointError on all ranks if any file is damaged. A collective.
    """
    if all(collectives.gather_objects(checkpoint.verified)):
        return
    kinds = collectives.gather_objects(checkpoint.index.ranks)
    peers = [rank for rank, kind in enumerate(kinds) if kind == checkpoint.index.ranks]
    place = peers.index(collectives.rank)
    agree(collectives, trouble_of(lambda: checkpoint.verify(place, len(peers))))
    checkpoint.verified = True


def fill(runtime: ZeroRuntime, sources: Mapping[str, TensorSource]) -> None:
    """Fill this rank's shards of the states in `sources` (by name: `master`, `exp_avg`, ...) with their ranges.

    No collective. The caller has already compared names and shapes (`compatibility.check_shapes`). States that are not
    in `sources` stay as they are.
    """

    def read_into(state: str, name: str, start: int, target: torch.Tensor) -> None:
        read_in_blocks(sources[state], name, start, target)

    _fill_with(runtime, list(sources), read_into)


def _fill_with(
    runtime: ZeroRuntime,
    states: Collection[str],
    read_into: Callable[[str, str, int, torch.Tensor], None],
    left_out: Collection[str] = (),
) -> None:
    """Call `read_into(state, name, start, target)` to fill every piece that this rank holds of these states.

    Parameters that are `left_out` keep their values.
    """
    with torch.no_grad():
        for unit in runtime.units:
            names = [name for name in unit.names if name not in left_out]
            with runtime.resident(unit, writes=True):
                if MASTER in states:
                    unit.fill_weights(names, partial(read_into, MASTER))
                for state, shard in runtime.optimizer.told_states_of(unit).items():
                    if state in states:
                        fill_state(unit, shard, names, partial(read_into, state))
    runtime.renew()


def fill_state(unit: Unit, shard: ToldState, names: Sequence[str], read_into: ReadInto) -> None:
    """Fill this rank's pieces of the parameters in `names` in one optimizer state of the unit."""
    if isinstance(shard, torch.Tensor):
        unit.parameters.fill(shard, names, read_into)
        return
    for piece in unit.parameters.pieces.values():
        # READ_NUMEL is a multiple of the block size, so every write begins at a block.
        for start in range(piece.start, piece.stop, READ_NUMEL) if piece.name in names else ():
            values = torch.zeros(min(READ_NUMEL, piece.stop - start))  # padding of slices is not read
            unit.slices.fill(piece.name, start, values, read_into)
            shard.write(piece.shard_offset + start - piece.start, values)


def shards_of(runtime: ZeroRuntime, unit: Unit) -> dict[str, ToldState]:
    """The shards of a unit that a checkpoint stores, [S] each, by state; they are the runtime's own tensors, no copies.

    Offloaded shards are empty unless the unit is resident.
    """
    return {MASTER: unit.weights_shard, **runtime.optimizer.told_states_of(unit)}


def _check(runtime: ZeroRuntime, checkpoint: CheckpointReader, *, weights_only: bool = False) -> None:
    index = checkpoint.index
    check_same_model(runtime, index, str(checkpoint.path))
    if not weights_only:
        check_same_optimizer(runtime, index, str(checkpoint.path))
    for unit in runtime.units:
        for state in (MASTER,) if weights_only else shards_of(runtime, unit):
            for piece in unit.parameters.pieces.values():
                if index.parameters[piece.name].left_out:
                    continue
                for span in unit.slices.spans(piece.name, piece.start, piece.stop):
                    for _, start, numel in checkpoint.stored(piece.name, span.full, span.full + span.numel):
                        for extent in checkpoint.extents(state, piece.name, start, start + numel):
                            checkpoint._file(extent.file)
    for entry in index.buffers.values():
        checkpoint._file(entry.file)


def _fill_all(runtime: ZeroRuntime, checkpoint: CheckpointReader, states: Collection[str]) -> None:
    try:
        left_out = {name for name, entry in checkpoint.index.parameters.items() if entry.left_out}
        _fill_with(runtime, states, checkpoint.read_into, left_out)
        own = kept_buffers(runtime.model)
        with torch.no_grad():
            for name, values in checkpoint.buffers().items():
                own[name].copy_(values)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (found while reading: the run is filled in part; do not train it)") from error
    finally:
        checkpoint.close()


def _load_scaler(runtime: ZeroRuntime, found: Mapping[str, Any]) -> None:
    """Resume the loss scale if it is dynamic in both runs; otherwise start the runtime's own rule from its start."""
    fresh = runtime.settings.loss_scale.start()
    if found["moves"] and fresh.rule.static is None:
        values = {key: found[key] for key in ("scale", "hysteresis_left", "steps", "last_overflow")}
        fresh = replace(fresh, **values)
    runtime.scaler = fresh
