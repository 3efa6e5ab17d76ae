"""A checkpoint of another library as tensor sources, and how a runtime loads it; the reader of its format builds it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.checkpoint.compatibility import check_shapes, kept_buffers
from zero_runtime.checkpoint.layout import MASTER
from zero_runtime.checkpoint.load import fill
from zero_runtime.errors import CheckpointError, brief
from zero_runtime.optim.configs import TorchConfig
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.tensor_source import TensorSource

_BLOCK_BYTES = 1 << 20


class Chunk(NamedTuple):
    """Elements [start, stop) of a flattened parameter. `read(low, high)` returns a range, counted from `start`."""

    start: int
    stop: int
    read: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another library.

    kind: a description for messages. updates: number of optimizer steps. parameters: shapes by name. chunks: by state
    (`master`, `exp_avg`, ...), then by parameter. tied: other names of parameters, each with the name under which the
    parameter is stored. archives: files that are mapped into memory, whose checksums `verify` compares.
    """

    path: Path
    kind: str
    updates: int
    parameters: dict[str, tuple[int, ...]]
    chunks: dict[str, dict[str, list[Chunk]]]
    tied: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    archives: tuple[Path, ...] = ()

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the optimizer's states; empty if the checkpoint holds only weights."""
        return tuple(state for state in self.chunks if state != MASTER)

    def source(self, state: str) -> TensorSource:
        """The source of one state."""
        return _ChunkSource(self, state)

    def verify(self, place: int = 0, places: int = 1) -> None:
        """Read the archives place, place + places, ... once; CheckpointError if one is damaged."""
        for file in self.archives[place::places]:
            check_archive(file)


class _ChunkSource:
    def __init__(self, checkpoint: ForeignCheckpoint, state: str) -> None:
        self._checkpoint = checkpoint
        self._chunks = checkpoint.chunks[state]

    def names(self) -> Sequence[str]:
        return list(self._chunks)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.parameters[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        values, end = torch.empty(stop - start, dtype=torch.float32), start
        for chunk in sorted(self._chunks[name], key=lambda chunk: chunk.start):
            low, high = max(chunk.start, end), min(chunk.stop, stop)
            if chunk.start <= end and low < high:
                values[low - start : high - start] = chunk.read(low - chunk.start, high - chunk.start)
                end = high
        if end < stop:
            raise CheckpointError(
                f"{self._checkpoint.path}: expected elements [{start}, {stop}) of {name}, found none from {end} on; "
                "bring the files of all ranks together"
            )
        return values


def of_tensor(flat: torch.Tensor, start: int, stop: int, offset: int = 0) -> Chunk:
    """A chunk of elements [start, stop) of a parameter, which a 1-D tensor holds from `offset` on."""
    if not isinstance(flat, torch.Tensor) or flat.dim() != 1 or not 0 <= offset <= flat.numel() - (stop - start):
        raise ValueError(f"no {stop - start} elements from {offset} on")
    return Chunk(start, stop, lambda low, high: flat[offset + low : offset + high])


def load_foreign(
    runtime: ZeroRuntime, open_it: Callable[[], ForeignCheckpoint], *, weights_only: bool = False
) -> ForeignCheckpoint:
    """Fill the runtime's weights and optimizer states, under any plan. Every rank calls it, between two steps.

    CheckpointError, the same on every rank, unless the checkpoint fits this model and, if it has states and
    `weights_only` is False, this optimizer; then nothing has been changed.
    """
    runtime.check_between_steps("load_foreign")
    opened: list[ForeignCheckpoint] = []

    def look() -> None:
        found = open_it()
        check_shapes(runtime, found.parameters, str(found.path), found.tied)
        if found.states and not weights_only:
            _check_optimizer(runtime, found)
        _check_buffers(runtime, found)
        opened.append(found)

    agree(runtime.collectives, trouble_of(look))
    (found,) = opened
    rank, world = runtime.collectives.rank, runtime.collectives.world
    agree(runtime.collectives, trouble_of(lambda: found.verify(rank, world)))
    states = (MASTER, *(() if weights_only or not found.states else runtime.optimizer.state_names))
    agree(runtime.collectives, trouble_of(lambda: fill(runtime, {state: found.source(state) for state in states})))
    if len(states) > 1:
        runtime.optimizer.load_counters({"updates": float(found.updates)})
    _fill_buffers(runtime, found.buffers)
    return found


def _check_optimizer(runtime: ZeroRuntime, found: ForeignCheckpoint) -> None:
    own = list(runtime.optimizer.state_names)
    trained = [name for unit in runtime.units if unit.trainable for name in unit.names]
    without = [name for state in own for name in trained if name not in found.chunks.get(state, {})]
    if without or isinstance(runtime.optimizer.config, TorchConfig):
        name = runtime.optimizer.config.name
        raise CheckpointError(
            f"{found.path}: another optimizer: expected {name} with {', '.join(own) or 'no states'} "
            f"for every trained parameter, found {', '.join(found.states)}"
            f"{f', and none for {without[0]}' if without else ''}; use the optimizer that saved it, or take its "
            "weights alone"
        )


def check_archive(file: Path) -> None:
    """Read a file of torch.save once; CheckpointError if a checksum in it differs.

    torch.load does not compare them, so a flipped bit in a tensor would go unnoticed into training. Files without
    checksums pass: those from before 2020 are no archives, and torch.serialization.set_crc32_options(False) writes
    zeros.
    """
    try:
        if zipfile.is_zipfile(file):
            _compare_checksums(file)
    except Exception as error:  # a damaged archive may raise any error
        raise CheckpointError(
            f"{file}: expected the records that were written, found damage ({brief(error)}); copy the file again"
        ) from error


def _compare_checksums(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.CRC:  # else ZipFile.testzip would do
                with archive.open(record) as data:
                    while data.read(_BLOCK_BYTES):
                        pass


def _check_buffers(runtime: ZeroRuntime, found: ForeignCheckpoint) -> None:
    for name, buffer in kept_buffers(runtime.model).items():
        values = found.buffers.get(name, buffer)
        if not isinstance(values, torch.Tensor) or values.numel() != buffer.numel():
            raise CheckpointError(
                f"{found.path}: another architecture: expected {buffer.numel()} elements of {name}, found others; "
                "build the model that saved it"
            )


def _fill_buffers(runtime: ZeroRuntime, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in kept_buffers(runtime.model).items():
            if name in buffers:
                buffer.copy_(buffers[name].view(buffer.shape))
