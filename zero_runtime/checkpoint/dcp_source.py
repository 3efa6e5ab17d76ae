"""Reads PyTorch distributed checkpoints (torch.distributed.checkpoint), as FSDP2 and DDP programs save them.

Expected is what `get_state_dict` gives, under any keys: the model's tensors as `<key>.<parameter>`, the optimizer's as
`<key>.state.<parameter>.<state>`. Chunks must be whole rows (sharded over dimension 0), as FSDP2's are.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_runtime.checkpoint.foreign import Chunk, ForeignCheckpoint, Shape
from zero_runtime.checkpoint.layout import MASTER
from zero_runtime.errors import CheckpointError

METADATA = ".metadata"
# What a metadata file may name; everything else ends the reading. See [Note: no code from a checkpoint].
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
_DTYPES = {name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return Path
        if (module, name) == ("torch", "Size") or (module == "torch" and name in _DTYPES):
            return getattr(torch, name)
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is none of the plain classes of this format")


class _Item(NamedTuple):
    """One chunk of a tensor: its first element, its sizes, and where its file has it, in bytes."""

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
    """Open a checkpoint of a model with parameters of these names. Reads its metadata and the optimizer's step.

    CheckpointError where it cannot be read, or no key holds such a model.
    """
    path, names = Path(path), list(names)
    tensors = _read_metadata(path)
    model = _prefix_of(path, tensors, names)
    own = {key.removeprefix(model): found for key, found in tensors.items() if key.startswith(model)}
    optimizer = next((key.partition(f"state.{names[0]}.")[0] for key in tensors if f"state.{names[0]}." in key), None)
    if optimizer is None:  # the first may be frozen
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
                updates = max(updates, int(_load(found.items[0])))
            elif found.shape == own[name].shape:
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
    """Tensors of the model that are no parameters: its buffers, and other names of tied weights, which nobody asks
    for."""

    def __init__(self, tensors: Mapping[str, _Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return _load(self._tensors[name].items[0])

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _prefix_of(path: Path, tensors: Mapping[str, _Tensor], names: Sequence[str]) -> str:
    """What stands before the parameters' names: that under which most of them are."""
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


@lru_cache(maxsize=1)  # one chunk is read in several ranges, one after the other
def _load(item: _Item) -> torch.Tensor:
    try:
        with item.file.open("rb") as file:
            file.seek(item.offset)
            data = io.BytesIO(file.read(item.length))
        values = torch.load(data, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        told = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{item.file}: expected a tensor of {list(item.sizes)} at byte {item.offset}, found none that torch reads "
            f"without running code ({told}); copy the folder again"
        ) from error
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != item.sizes:
        raise CheckpointError(f"{item.file}: expected a tensor of {list(item.sizes)}, found another; copy it again")
    return values


def _read_metadata(path: Path) -> dict[str, _Tensor]:
    """The tensors by key. What is no tensor (a rate, a number of steps) is left where it is."""
    file = path / METADATA
    try:
        with file.open("rb") as data:
            metadata = _Unpickler(data).load()
        places: dict[str, list[tuple[Any, Any]]] = {}
        for key, place in metadata.storage_data.items():
            places.setdefault(key.fqn, []).append((key, place))
        return {
            key: _Tensor(tuple(entry.size), tuple(_item(path, entry, *place) for place in places[key]))
            for key, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
    except (OSError, pickle.UnpicklingError, AttributeError, KeyError, TypeError, EOFError, IndexError) as error:
        raise CheckpointError(
            f"{file}: expected the metadata of a distributed checkpoint, found something else ({error}); save it anew "
            "with torch.distributed.checkpoint, or copy the folder again"
        ) from error


def _item(path: Path, entry: Any, key: Any, place: Any) -> _Item:
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(f"{path}: expected plain tensors, found {place.transform_descriptors}; save it without")
    if Path(place.relative_path).name != place.relative_path:
        raise CheckpointError(f"{path}: expected names of files beside {METADATA}, found {place.relative_path!r}")
    wanted = tuple(key.offset or ())
    chunk = next(chunk for chunk in entry.chunks if tuple(chunk.offsets) == wanted)
    return _Item(wanted, tuple(chunk.sizes), path / place.relative_path, place.offset, place.length)
