"""Opens the files of a checkpoint or of a folder of weights, and reads the headers of safetensors files.

This module is pure, so that a command can check weights before it starts anything.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero_runtime.errors import CheckpointError, brief

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH_BYTES = 8
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_LARGEST_HEADER_BYTES = 100_000_000  # the library's own limit
_LARGEST_SMALL_BYTES = 1 << 30


class HeaderEntry(NamedTuple):
    """The name of a tensor's dtype, its shape, and its offset in bytes from the start of its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class OpenFile:
    """An open regular file with positioned reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise opening a pipe without a writer blocks
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            os.close(self.fd)
            raise OSError(errno.EINVAL, "no regular file")
        self.size = os.fstat(self.fd).st_size

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` from `offset`; CheckpointError if the file ends early or the disk fails."""
        while target:
            try:
                count = os.preadv(self.fd, [target], offset)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: expected {len(target)} more bytes at {offset}, found the file's end; the checkpoint "
                    "is damaged: take another one, or a copy"
                )
            target, offset = target[count:], offset + count


def opened(path: Path) -> OpenFile:
    """Open a file for reading; CheckpointError, naming the path, if it cannot be opened."""
    try:
        return OpenFile(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(
            f"{path}: expected a file of the checkpoint, found none; copy the whole folder, or take another checkpoint"
        )
    if isinstance(error, PermissionError):
        return CheckpointError(f"{path}: expected to be allowed to read it, found {error.strerror}; mend its rights")
    return CheckpointError(f"{path}: expected to read it, found {error}; take another checkpoint, or a copy")


def read_small_file(path: Path) -> bytes:
    """All bytes of a file of at most 1 GiB; CheckpointError if it is larger or cannot be read."""
    with opened(path) as file:
        size = os.fstat(file.fd).st_size
        if size > _LARGEST_SMALL_BYTES:
            raise CheckpointError(
                f"{path}: expected at most {_LARGEST_SMALL_BYTES} bytes, found {size}; take another checkpoint, or a "
                "copy"
            )
        data = bytearray(size)
        file.read_into(memoryview(data), 0)
    return bytes(data)


def read_header(file: OpenFile) -> dict[str, HeaderEntry]:
    """The tensors of a safetensors file. CheckpointError for a damaged header, or a file that ends before a tensor."""
    length = bytearray(LENGTH_BYTES)
    file.read_into(memoryview(length), 0)
    size = int.from_bytes(length, "little")
    try:
        if size > _LARGEST_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        text = bytearray(size)
        file.read_into(memoryview(text), LENGTH_BYTES)
        entries = {key: entry for key, entry in json.loads(text).items() if key != "__metadata__"}
        return {key: _entry(file, key, entry, LENGTH_BYTES + size) for key, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{file.path}: expected a safetensors header, found something else ({brief(error)}); the checkpoint is "
            "damaged: take another one, or a copy"
        ) from error


def _entry(file: OpenFile, key: str, entry: Mapping[str, Any], base: int) -> HeaderEntry:
    if entry["dtype"] not in DTYPE_BYTES:
        raise CheckpointError(
            f"{file.path}: expected {key} in one of the dtypes {', '.join(DTYPE_BYTES)}, found {entry['dtype']}; "
            "convert the weights to one of them"
        )
    (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
    if stop - start != math.prod(shape) * DTYPE_BYTES[entry["dtype"]]:
        raise ValueError(f"{key}: {stop - start} bytes for the shape {list(shape)}")
    if not 0 <= start <= stop <= file.size - base:
        raise ValueError(f"{key}: bytes {start} to {stop} of the {file.size - base} that follow the header")
    return HeaderEntry(entry["dtype"], shape, base + start)


def read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor, from the index of a folder of weights. CheckpointError if it is damaged, or names a file
    outside the folder."""
    path = folder / WEIGHTS_INDEX
    try:
        places = {str(name): str(file) for name, file in json.loads(read_small_file(path))["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected an index with a weight_map, found something else ({brief(error)}); copy the folder again"
        ) from error
    for file in places.values():
        if Path(file).name != file or len(file) > 255:  # the most that a file's name has on Linux
            raise CheckpointError(
                f"{path}: expected names of files beside it, found {brief(file)!r}; copy the folder again"
            )
    return places


def check_weights(folder: Path) -> None:
    """Reads the index and the headers of a folder of weights. CheckpointError if one of them is damaged."""
    names = read_index(folder).values() if (folder / WEIGHTS_INDEX).exists() else (WEIGHTS,)
    for name in dict.fromkeys(names):
        with opened(folder / name) as file:
            read_header(file)
