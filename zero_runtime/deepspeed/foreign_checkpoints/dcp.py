"""Reads PyTorch distributed checkpoints (torch.distributed.checkpoint), as FSDP2 and DDP programs save them.

The checkpoint must hold what `get_state_dict` returns, under any keys: the model's tensors as `<key>.<parameter>`, the
optimizer's as `<key>.state.<parameter>.<state>`. Chunks must be complete rows (sharded over dimension 0), as FSDP2's
are.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_runtime.checkpoint.files import opened, read_small_file
from zero_runtime.checkpoint.layout import MASTER
from zero_runtime.deepspeed.foreign_checkpoints.archive import check_archive
from zero_runtime.deepspeed.foreign_checkpoints.pickled import StandIn, field, read_pickle
from zero_runtime.deepspeed.foreign_checkpoints.source import Chunk, ForeignCheckpoint, Shape
from zero_runtime.errors import CheckpointError, brief

METADATA = ".metadata"
# The classes that a metadata file may name; any other name is an error. See [Note: no code from a checkpoint].
_PLAIN = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")}
_MOST = 1 << 62
_DTYPES = {name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)}


def _allows(module: str, name: str) -> bool:
    if module == "torch":
        return name == "Size" or name in _DTYPES
    return (module, name) in _PLAIN or (module, name) in _PATHS


class _Item(NamedTuple):
    """One chunk of a tensor: the index of its first element, its sizes, and its file, byte offset and byte length."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    items: tuple[_Item, ...]


def is_dcp(path: Path) -> bool:
    """Whether a folder is a distributed checkpoint."""
    return (path / METADATA).is_file()


def open_dcp(path: str | Path, names: Iterable[str]) -> ForeignCheckpoint:
    """Open a checkpoint of a model whose parameters have these names. Reads its metadata and the optimizer's steps.

    CheckpointError if it cannot be read, or if it holds no such model under any key.
    """
    path, names = Path(path), list(names)
    tensors = _read_metadata(path)
    model = _prefix_of(path, tensors, names)
    own = {key.removeprefix(model): found for key, found in tensors.items() if key.startswith(model)}
    # The keys of the optimizer's states share a prefix, which ends before "state.<parameter>.".
    optimizer = next((key.partition(f"state.{names[0]}.")[0] for key in tensors if f"state.{names[0]}." in key), None)
    if optimizer is None:  # the first parameter may be frozen
        ends = [(key, name) for name in names for key in tensors if f"state.{name}." in key]
        optimizer = ends[0][0].partition(f"state.{ends[0][1]}.")[0] if ends else None
    chunks = {MASTER: {name: _chunks(path, name, own[name]) for name in names if name in own}}
    updates = 0
    for name in names if optimizer is not None else ():
        begin = f"{optimizer}state.{name}."
        for key, found in tensors.items():
            state = key.removeprefix(begin)
            if not key.startswith(begin) or "." in state:
                continue
            if state == "step":
                updates = max(updates, _number(path, key, found))
            elif name in own and found.shape == own[name].shape:
                chunks.setdefault(state, {})[name] = _chunks(path, key, found)
    rest = {name: found for name, found in own.items() if name not in chunks[MASTER]}
    return ForeignCheckpoint(
        path=path,
        kind="PyTorch distributed checkpoint",
        updates=updates,
        parameters={name: Shape(own[name].shape) for name in names if name in own},
        chunks=chunks,
        buffers=_Buffers(rest),  # type: ignore[arg-type]  # read when they are asked for
    )


class _Buffers(Mapping[str, torch.Tensor]):
    """Tensors of the model that are not parameters, read on access: its buffers, and other names of tied weights,
    which are never requested."""

    def __init__(self, tensors: Mapping[str, _Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return _load(self._tensors[name].items[0])

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _number(path: Path, key: str, found: _Tensor) -> int:
    """A count that is stored as a tensor of one element; CheckpointError if it is not a count."""
    value = _load(found.items[0]).double() if found.items and math.prod(found.shape) == 1 else None
    if value is None or not 0 <= float(value) < _MOST:
        raise CheckpointError(f"{path}: expected a count of steps in {key}, found none; copy the folder again")
    return int(value)


def _prefix_of(path: Path, tensors: Mapping[str, _Tensor], names: Sequence[str]) -> str:
    """The key prefix of the parameters' names: the one that most of them have, and of equal ones the shortest."""
    found: dict[str, int] = {}
    for name in names:
        for key in tensors:
            if (key == name or key.endswith(f".{name}")) and f"state.{name}" not in key:
                prefix = key.removesuffix(name)
                found[prefix] = found.get(prefix, 0) + 1
    if not found:
        raise CheckpointError(
            f"{path}: another architecture: expected a tensor called {names[0]}, found {', '.join(list(tensors)[:3])}, "
            "...; build the model that saved it"
        )
    return max(found, key=lambda prefix: (found[prefix], -len(prefix)))


def _chunks(path: Path, name: str, tensor: _Tensor) -> list[Chunk]:
    row = math.prod(tensor.shape[1:])
    chunks = []
    for item in tensor.items:
        if item.sizes[1:] != tensor.shape[1:]:
            raise CheckpointError(
                f"{path}: expected {name} sharded over its first dimension, found a part of {list(item.sizes)} of "
                f"{list(tensor.shape)}; save it whole (get_state_dict with full_state_dict=True)"
            )
        start = item.offsets[0] * row if item.offsets else 0
        chunks.append(Chunk(start, start + math.prod(item.sizes), _reader(item)))
    return chunks


def _reader(item: _Item) -> Any:
    return lambda low, high: _load(item).reshape(-1)[low:high]


@lru_cache(maxsize=1)  # a chunk is read in several consecutive ranges
def _load(item: _Item) -> torch.Tensor:
    data = _bytes_of(item)
    try:
        check_archive(data)
        data.seek(0)
        values = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise any error
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"{item.file}: expected a tensor of {list(item.sizes)} at byte {item.offset}, found none that torch reads "
            f"without running code ({told}); copy the folder again"
        ) from error
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != item.sizes or not values.is_contiguous():
        raise CheckpointError(f"{item.file}: expected a tensor of {list(item.sizes)}, found another; copy it again")
    return values


def _bytes_of(item: _Item) -> io.BytesIO:
    with opened(item.file) as file:
        data = bytearray(min(item.length, os.fstat(file.fd).st_size))  # a damaged length may exceed the file
        file.read_into(memoryview(data), item.offset)
    return io.BytesIO(data)


def _read_metadata(path: Path) -> dict[str, _Tensor]:
    """The tensors by key. Values that are not tensors (a rate, a number of steps) are not read."""
    file = path / METADATA
    data = read_small_file(file)
    try:
        metadata = read_pickle(io.BytesIO(data), _allows)
        places: dict[str, list[tuple[Any, Any]]] = {}
        for key, place in field(metadata, "storage_data").items():
            places.setdefault(field(key, "fqn"), []).append((key, place))
        return {
            str(key): _Tensor(_sizes(field(entry, "size")), tuple(_item(path, entry, *place) for place in places[key]))
            for key, entry in field(metadata, "state_dict_metadata").items()
            if isinstance(entry, StandIn) and entry.has("chunks")
        }
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise any error
        raise CheckpointError(
            f"{file}: expected the metadata of a distributed checkpoint, found something else "
            f"({type(error).__name__}: {error}); save it anew with torch.distributed.checkpoint, or copy the folder "
            "again"
        ) from error


def _item(path: Path, entry: Any, key: Any, place: Any) -> _Item:
    transforms = place.has("transform_descriptors") and place.field("transform_descriptors")
    if transforms:
        raise CheckpointError(f"{path}: expected plain tensors, found transformed ones; save it without extensions")
    file = field(place, "relative_path")
    if not isinstance(file, str) or Path(file).name != file:
        raise CheckpointError(
            f"{path}: expected names of files beside {METADATA}, found {brief(file)!r}; copy the folder again"
        )
    wanted = _sizes(field(key, "offset") or ())
    chunk = next((one for one in field(entry, "chunks") if _sizes(field(one, "offsets")) == wanted), None)
    if chunk is None:
        raise ValueError(f"no part of the tensor at {list(wanted)}")
    offset, length = (_count(field(place, name)) for name in ("offset", "length"))
    return _Item(wanted, _sizes(field(chunk, "sizes")), path / file, offset, length)


def _sizes(found: Any) -> tuple[int, ...]:
    """The sizes in a torch.Size, or in a plain list or tuple; ValueError if they are not counts."""
    if isinstance(found, StandIn) and len(found.arguments) == 1:
        (found,) = found.arguments
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"a {type(found).__name__} where sizes belong")
    sizes = tuple(map(_count, found))
    _count(math.prod(sizes))
    return sizes


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < _MOST:
        raise ValueError("a number where a count of bytes or elements belongs, which is none")
    return found
