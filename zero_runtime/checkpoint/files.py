"""Bytes on the disk: one rank's safetensors file, written at the disk's speed and synced, and read in ranges.

The checksum is CRC-32 as zlib has it: every program can check it, and it is computed in a thread of its own while the
block is written (zlib and write both let other threads run).
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_runtime.checkpoint.layout import FileEntry
from zero_runtime.checkpoint.snapshot import SAFETENSORS_NAME, Slice
from zero_runtime.errors import CheckpointError

BLOCK_BYTES = 8 * 2**20
_LENGTH_BYTES = 8  # of the header, little-endian: https://github.com/huggingface/safetensors, "Format"
DTYPE_OF = {name: dtype for dtype, name in SAFETENSORS_NAME.items()}


def write_slices(path: Path, slices: Sequence[Slice], *, pause_s: float = 0.0) -> FileEntry:
    """Write and sync. `pause_s`: a rest after every block, for those who want to be in time to kill it."""
    header, offset = {}, 0
    for one in slices:
        size = one.values.numel() * one.values.element_size()
        dtype, shape = SAFETENSORS_NAME[one.values.dtype], [one.values.numel()]
        header[one.key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # tensors begin aligned
    blocks = [memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text)]
    for one in slices:
        data = _bytes_of(one.values.contiguous())
        blocks += [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
    crc = 0
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        for block in blocks:
            summing = pool.submit(zlib.crc32, block, crc)
            _write_all(file.fileno(), block)
            crc = summing.result()
            if pause_s:
                time.sleep(pause_s)
        os.fsync(file.fileno())
    total = sum(len(block) for block in blocks)
    return FileEntry(total, crc, {one.key: (one.start, one.stop) for one in slices})


def _bytes_of(values: torch.Tensor) -> memoryview:
    array: Any = values.view(torch.uint8).numpy()
    return memoryview(array)


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:  # a nearly full disk takes a part of it
        block = block[os.write(descriptor, block) :]


def write_synced(path: Path, text: str) -> None:
    """The whole text under this name, or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Place(NamedTuple):
    """Where a tensor's bytes begin in a file, and its dtype."""

    offset: int
    dtype: torch.dtype


def read_header(path: Path) -> dict[str, Place]:
    """The places of the tensors in a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    return {
        key: Place(_LENGTH_BYTES + length + entry["data_offsets"][0], DTYPE_OF[entry["dtype"]])
        for key, entry in header.items()
        if key != "__metadata__"
    }


def read_range(path: Path, place: Place, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of one tensor. A short file is an error, never a short answer."""
    size = torch.empty(0, dtype=place.dtype).element_size()
    values = torch.empty(stop - start, dtype=place.dtype)
    view = _bytes_of(values)
    with path.open("rb", buffering=0) as file:
        file.seek(place.offset + start * size)
        while view:
            got = file.readinto(view)
            if not got:
                raise CheckpointError(
                    f"{path}: ended {len(view)} bytes early; the file is cut off, take an older checkpoint"
                )
            view = view[got:]
    return values


def crc32_of(path: Path) -> int:
    crc = 0
    block = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(block):
            crc = zlib.crc32(memoryview(block)[:got], crc)
    return crc
