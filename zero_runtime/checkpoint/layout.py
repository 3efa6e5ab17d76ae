"""The file names of a checkpoint's folder, and its index as data classes, with strict reading and canonical writing.

This module is pure: it reads and writes no files.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zero_runtime.checkpoint.files import DTYPE_BYTES
from zero_runtime.errors import CheckpointError, brief
from zero_runtime.optim.configs import MATRIX_STATES, MuonConfig
from zero_runtime.slices import DividedParameter
from zero_runtime.wings import SPLIT, load

FORMAT = "zero-lab checkpoint"
VERSION = 1
SLICED_VERSION = 2  # of an index with split parameters, which earlier releases cannot read
INDEX = "index.json"
OWNER = "owner"  # in a partial folder: the mark of the process that leads the save; removed by the commit
MASTER = "master"  # the state that holds the weights
BUFFER = "buffer"  # replaces the state in the key of a buffer
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def partial_name(step: int) -> str:
    """The folder of a checkpoint that is not committed yet."""
    return f".{step_name(step)}.partial"


def trash_name(step: int, token: str) -> str:
    """The folder of a checkpoint that is being deleted."""
    return f".trash-{step_name(step)}-{token}"


def step_of(folder: str) -> int | None:
    """The step of a committed checkpoint's folder name; None for any other name."""
    match = _STEP.fullmatch(folder)
    return int(match[1]) if match else None


def rank_file(rank: int, world: int) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def report_file(rank: int, world: int) -> str:
    """The report that a rank writes into the partial folder after its file is durable or has failed.

    The commit removes it.
    """
    return f"rank-{rank:05d}-of-{world:05d}.json"


def tensor_key(state: str, name: str) -> str:
    return f"{state}/{name}"


def checksum_text(crc32: int) -> str:
    return f"crc32:{crc32:08x}"


class Extent(NamedTuple):
    """Elements [start, stop) of a flattened parameter, stored as one tensor of a file."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter. dtype: that of its master, as safetensors names it. pieces: by state, in order of start.

    A frozen parameter may be left out: then it has no pieces, and the run that loads the checkpoint keeps its values.
    split: how tensor-parallel ranks divided the parameter; its pieces then count the elements of all slices, padding
    included, one slice after another.
    """

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    pieces: dict[str, tuple[Extent, ...]]
    split: DividedParameter | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_numel(self) -> int:
        """Number of elements that the pieces of one state have together."""
        return self.numel if self.split is None else self.split.degree * self.split.local_numel

    @property
    def left_out(self) -> bool:
        return not self.trainable and not self.pieces


class BufferEntry(NamedTuple):
    """One buffer of the model, stored in full in one file."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class FileEntry(NamedTuple):
    """The size and checksum that an undamaged file has."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class OptimizerEntry:
    """The optimizer's name, the names of its states, and its counters by name."""

    name: str
    states: tuple[str, ...]
    counters: dict[str, float]

    def states_of(self, entry: ParameterEntry) -> tuple[str, ...]:
        """The states of one trained parameter: all, but Muon has some for its matrices and others for the rest."""
        if self.name != MuonConfig().name:
            return self.states
        is_matrix = any(state in entry.pieces for state in MATRIX_STATES)
        return tuple(state for state in self.states if (state in MATRIX_STATES) == is_matrix)


@dataclass(frozen=True)
class Index:
    """A checkpoint without its tensors.

    ranks: the ranks whose files are in this folder; all of `world`, unless the checkpoint is local to a node.
    trainer: the state that the caller passed to `save_checkpoint`.
    """

    step: int
    world: int
    ranks: tuple[int, ...]
    parameters: dict[str, ParameterEntry]
    buffers: dict[str, BufferEntry]
    tied: dict[str, str]
    files: dict[str, FileEntry]
    optimizer: OptimizerEntry
    scaler: dict[str, Any]
    rng: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the folder holds the files of all ranks."""
        return len(self.ranks) == self.world

    def to_text(self) -> str:
        """The text of index.json, one JSON object. CheckpointError if `trainer` is not JSON."""
        try:
            body = json.dumps(_as_json(self), indent=None, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint of step {self.step}: expected a trainer state of finite numbers, texts, lists and dicts, "
                f"found one that JSON cannot hold ({error}); give plain values"
            ) from error
        # The first line holds only the checksum of all bytes after it: a flipped digit in the index is detected like
        # one in a tensor, and the file is still plain JSON.
        rest = body[1:]
        return f'{{"checksum":"{checksum_text(zlib.crc32(rest.encode()))}",\n{rest}'

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Index:
        """Parse index.json; CheckpointError, naming `path`, if a value is missing or mistyped or the checksum wrong."""
        reader = _Strict(path)
        found = reader.parse(data)
        reader.check_version(found)
        reader.check_checksum(found, data)
        return reader.index(found)


def _as_json(index: Index) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION if all(entry.split is None for entry in index.parameters.values()) else SLICED_VERSION,
        "step": index.step,
        "world": index.world,
        "ranks": list(index.ranks),
        "parameters": {name: _parameter_as_json(entry) for name, entry in index.parameters.items()},
        "buffers": {name: entry._asdict() for name, entry in index.buffers.items()},
        "tied": index.tied,
        "files": {name: entry._asdict() for name, entry in index.files.items()},
        "optimizer": vars(index.optimizer),
        "scaler": index.scaler,
        "rng": index.rng,
        "trainer": index.trainer,
    }


def _parameter_as_json(entry: ParameterEntry) -> dict[str, Any]:
    plain = {key: value for key, value in vars(entry).items() if key != "split"}
    if entry.split is not None:
        plain["split"] = {"dim": entry.split.dim, "parts": entry.split.parts, "degree": entry.split.degree}
    return plain


class _Strict:
    """Takes values out of parsed JSON and checks the type of each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fail(self, expected: str, found: str, advice: str = "") -> CheckpointError:
        advice = advice or "the checkpoint is damaged: take another one, or a copy"
        return CheckpointError(f"{self._path}: expected {expected}, found {found}; {advice}")

    def parse(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.fail("an index in JSON", f"{len(data)} bytes that are none ({brief(error)})") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            kind = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise self.fail(f"format {FORMAT!r}", repr(kind), "give the folder of a checkpoint written by this runtime")
        return found

    def check_version(self, found: Mapping[str, Any]) -> None:
        version = found.get("version")
        if version not in (VERSION, SLICED_VERSION):
            raise self.fail(
                f"format version {VERSION} or {SLICED_VERSION}",
                f"version {version!r}",
                "read it with the release that wrote it and save it anew, or train on with that release",
            )

    def check_checksum(self, found: Mapping[str, Any], data: bytes) -> None:
        actual = checksum_text(zlib.crc32(data.partition(b"\n")[2]))
        if found.get("checksum") != actual:
            raise self.fail(f"checksum {found.get('checksum')!r} after its first line", actual)

    def take(self, found: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
        if key not in found:
            raise self.fail(f"the key {key!r}", f"only {', '.join(sorted(found))}")
        value = found[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(f"{key!r} of another kind", f"{type(value).__name__} {str(value)[:40]!r}")
        return value

    def index(self, found: Mapping[str, Any]) -> Index:
        take = self.take
        try:
            index = Index(
                step=take(found, "step", int),
                world=take(found, "world", int),
                ranks=tuple(int(rank) for rank in take(found, "ranks", list)),
                parameters={name: self._parameter(entry) for name, entry in take(found, "parameters", dict).items()},
                buffers={name: self._buffer(entry) for name, entry in take(found, "buffers", dict).items()},
                tied=take(found, "tied", dict),
                files={name: self._file(entry) for name, entry in take(found, "files", dict).items()},
                optimizer=self._optimizer(take(found, "optimizer", dict)),
                scaler=take(found, "scaler", dict),
                rng=take(found, "rng", dict),
                trainer=take(found, "trainer", dict),
            )
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.fail("the fields of an index", f"values of other kinds ({brief(error)})") from error
        self._check_pieces(index)
        return index

    def _parameter(self, entry: Mapping[str, Any]) -> ParameterEntry:
        pieces = {
            state: tuple(Extent(str(file), int(start), int(stop)) for file, start, stop in extents)
            for state, extents in self.take(entry, "pieces", dict).items()
        }
        shape = tuple(int(size) for size in self.take(entry, "shape", list))
        split = self._split(self.take(entry, "split", dict), shape) if "split" in entry else None
        return ParameterEntry(shape, self._dtype(entry), self.take(entry, "trainable", bool), pieces, split)

    def _split(self, found: Mapping[str, Any], shape: tuple[int, ...]) -> DividedParameter:
        dim, degree = self.take(found, "dim", int), self.take(found, "degree", int)
        parts = tuple(int(size) for size in self.take(found, "parts", list))
        divides = len(parts) == 1 or all(size % max(degree, 1) == 0 for size in parts)
        if degree < 2 or not 0 <= dim < len(shape) or sum(parts) != shape[dim] or not divides:
            raise self.fail(f"a division of the shape {list(shape)}", f"{dict(found)}")
        return load(SPLIT)(shape, dim, parts, degree)

    def _buffer(self, entry: Mapping[str, Any]) -> BufferEntry:
        shape = tuple(int(size) for size in self.take(entry, "shape", list))
        return BufferEntry(shape, self._dtype(entry), self.take(entry, "file", str))

    def _dtype(self, entry: Mapping[str, Any]) -> str:
        found: str = self.take(entry, "dtype", str)
        if found not in DTYPE_BYTES:
            raise self.fail(f"one of the dtypes {', '.join(DTYPE_BYTES)}", repr(found[:40]))
        return found

    def _file(self, entry: Mapping[str, Any]) -> FileEntry:
        return FileEntry(self.take(entry, "bytes", int), self.take(entry, "checksum", str))

    def _optimizer(self, entry: Mapping[str, Any]) -> OptimizerEntry:
        counters = {name: float(value) for name, value in self.take(entry, "counters", dict).items()}
        return OptimizerEntry(self.take(entry, "name", str), tuple(self.take(entry, "states", list)), counters)

    def _check_pieces(self, index: Index) -> None:
        """Raise CheckpointError unless pieces are in order and do not overlap.

        If the folder holds the files of all ranks, the pieces of each state must also cover the full parameter.
        """
        for name, entry in index.parameters.items():
            for state in (MASTER, *(index.optimizer.states_of(entry) if entry.trainable else ())):
                end = 0
                for file, start, stop in entry.pieces.get(state, ()):
                    if file not in index.files or not start < stop <= entry.stored_numel or start < end:
                        raise self.fail(f"pieces of {state}/{name} in order", f"[{start}, {stop}) of {file}")
                    if index.is_whole and start > end:
                        break
                    end = stop
                if index.is_whole and end != entry.stored_numel and not entry.left_out:
                    raise self.fail(f"all {entry.stored_numel} elements of {state}/{name}", f"a gap at {end}")
