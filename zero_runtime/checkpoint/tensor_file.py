"""Reads and writes safetensors files of 1-D tensors: writes large blocks from the tensors' own memory, reads ranges.

The layout is the published one: 8 bytes of little-endian header length, the header in JSON, the tensors' bytes without
gaps. This module writes it, not the safetensors library, because the library needs all bytes together and computes no
checksum.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zero_runtime.checkpoint.digest import RunningDigest
from zero_runtime.checkpoint.files import LENGTH_BYTES, opened, read_header
from zero_runtime.checkpoint.layout import FileEntry
from zero_runtime.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SMALL_BYTES = 1 << 16  # tensors below this are joined before they are written
_READ_BYTES = 8 << 20


class LateValues:
    """Stands in for a tensor whose values are in a scratch file or quantized: each call of `cpu` computes them again.

    `in_file`: the values are in a scratch file, so no copy of them is made in memory before they are written.
    """

    def __init__(self, dtype: torch.dtype, numel: int, load: Callable[[], torch.Tensor], *, in_file: bool) -> None:
        self.dtype = dtype
        self.in_file = in_file
        self._numel = numel
        self._load = load

    def numel(self) -> int:
        return self._numel

    def element_size(self) -> int:
        return self.dtype.itemsize

    def cpu(self) -> torch.Tensor:
        return self._load()


Values = torch.Tensor | LateValues


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; empty for an empty tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)


def write_tensor_file(
    path: Path, tensors: Mapping[str, Values], metadata: Mapping[str, str], *, block_bytes: int
) -> FileEntry:
    """Write 1-D contiguous tensors and fsync. Tensors on a device are copied to the host one at a time.

    An OSError leaves an incomplete file.
    """
    digest, size = RunningDigest(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for block in _blocks(tensors, metadata, block_bytes):
            digest.add(block)
            _write_all(fd, block)
            _start_writeback(fd, size, len(block))
            size += len(block)
        os.fsync(fd)
    finally:
        digest.close()
        os.close(fd)
    return FileEntry(size, digest.text())


def _blocks(
    tensors: Mapping[str, Values], metadata: Mapping[str, str], block_bytes: int
) -> Iterator[bytes | memoryview]:
    """The bytes of the file in order: large tensors as slices of their memory, small ones joined into blocks."""
    parts = ((key, values.dtype, (values.numel(),)) for key, values in tensors.items())
    joined = bytearray(header_of(parts, metadata))
    for tensor in tensors.values():
        data = bytes_of(tensor.cpu())  # no copy if it is on the CPU already
        if len(data) < min(_SMALL_BYTES, block_bytes):
            joined += data
            if len(joined) < block_bytes:
                continue
            data = memoryview(b"")
        if joined:
            yield bytes(joined)
            joined.clear()
        for start in range(0, len(data), block_bytes):
            yield data[start : start + block_bytes]
    if joined:
        yield bytes(joined)


def header_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with these tensors (name, dtype, shape), whose bytes follow without gaps."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _write_all(fd: int, block: bytes | memoryview) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _start_writeback(fd: int, offset: int, size: int) -> None:
    """Ask the kernel to start writing these pages now, so that the final fsync has little left to do."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that created and renamed files survive a crash."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_file(path: Path, wanted: FileEntry) -> None:
    """Read the complete file once; CheckpointError unless size and checksum are as `wanted`."""
    advice = "the checkpoint is damaged: take another one, or a copy"
    digest = RunningDigest()
    with opened(path) as file:
        size = os.fstat(file.fd).st_size
        if size != wanted.bytes:
            raise CheckpointError(f"{path}: expected {wanted.bytes} bytes, found {size}; {advice}")
        buffers = [memoryview(bytearray(min(_READ_BYTES, max(size, 1)))) for _ in range(2)]
        offset = turn = 0
        try:
            while offset < size:
                block = buffers[turn][: min(_READ_BYTES, size - offset)]
                file.read_into(block, offset)
                digest.add(block)
                offset, turn = offset + len(block), 1 - turn
        finally:
            digest.close()
    if digest.text() != wanted.checksum:
        raise CheckpointError(f"{path}: expected checksum {wanted.checksum}, found {digest.text()}; {advice}")


class TensorEntry(NamedTuple):
    """A tensor's dtype, shape, and offset in bytes from the start of its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TensorFile:
    """An open safetensors file. `bytes_read` counts the bytes of tensors read, without headers."""

    def __init__(self, path: Path) -> None:
        self._file = opened(path)
        self.bytes_read = 0
        try:
            entries = read_header(self._file)
            self._places = {
                key: TensorEntry(DTYPES[entry.dtype], entry.shape, entry.offset) for key, entry in entries.items()
            }
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.__exit__()

    def keys(self) -> Sequence[str]:
        return list(self._places)

    def place(self, key: str) -> TensorEntry:
        """The entry of a tensor; CheckpointError if the file has no such key."""
        if key not in self._places:
            raise CheckpointError(
                f"{self._file.path}: expected a tensor {key!r}, found none; the checkpoint is damaged: take another "
                "one, or a copy"
            )
        return self._places[key]

    def read_into(self, key: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D `target` from element `start` of a tensor of the same dtype; reads no other bytes."""
        place = self.place(key)
        assert target.dtype == place.dtype, f"{key}: {place.dtype} into {target.dtype}"
        self._file.read_into(bytes_of(target), place.offset + start * place.dtype.itemsize)
        self.bytes_read += target.numel() * target.element_size()
