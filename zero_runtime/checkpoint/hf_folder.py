"""A folder of weights as Hugging Face libraries write and read it: sharded safetensors with an index, nothing else.

Names are the model's own. A tied parameter is written once, under the name of its owner, as `save_pretrained` does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zero_runtime.checkpoint.source import TensorSource
from zero_runtime.checkpoint.tensor_file import bytes_of, fsync_folder
from zero_runtime.errors import CheckpointError

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9  # what save_pretrained takes unless told
BLOCK_NUMEL = 4 << 20  # elements in memory at a time
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Written(NamedTuple):
    """What a folder holds: tensors, their bytes, and the files in order."""

    tensors: int
    bytes: int
    files: tuple[str, ...]


def write_weights(
    source: TensorSource, out: str | Path, *, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> Written:
    """Write all weights of `source` into the new folder `out`, cast to `dtype`; it appears when it is whole.

    Memory: BLOCK_NUMEL elements, however large a tensor is. CheckpointError where `out` exists or cannot be written.
    """
    out = Path(out)
    if out.exists():
        raise CheckpointError(f"{out}: expected a folder that is not there yet, found one; give another, or remove it")
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        written = _write_files(source, partial, dtype, max_file_bytes)
        fsync_folder(partial)
        partial.rename(out)
        fsync_folder(out.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{out}: could not be written: {error}; make room or give another folder") from error
    return written


def _write_files(source: TensorSource, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> Written:
    groups = list(_grouped(source, dtype, max_file_bytes))
    count = len(groups)
    files = [WEIGHTS if count == 1 else f"model-{place + 1:05d}-of-{count:05d}.safetensors" for place in range(count)]
    total = sum(math.prod(source.shape(name)) for group in groups for name in group) * dtype.itemsize
    for file, names in zip(files, groups, strict=True):
        _write_file(source, folder / file, names, dtype)
    if count > 1:
        places = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_text(folder / WEIGHTS_INDEX, json.dumps(index, indent=2) + "\n")
    return Written(sum(map(len, groups)), total, tuple(files))


def _grouped(source: TensorSource, dtype: torch.dtype, max_file_bytes: int) -> Iterator[list[str]]:
    """Names in order, as many to a file as fit; a tensor that is larger has a file of its own."""
    group: list[str] = []
    size = 0
    for name in source.names():
        own = math.prod(source.shape(name)) * dtype.itemsize
        if group and size + own > max_file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += own
    yield group


def _write_file(source: TensorSource, path: Path, names: Sequence[str], dtype: torch.dtype) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without
    offset = 0
    for name in names:
        shape = list(source.shape(name))
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            numel = math.prod(source.shape(name))
            for start in range(0, numel, BLOCK_NUMEL):
                values = source.read(name, start, min(start + BLOCK_NUMEL, numel))
                file.write(bytes_of(values.to(dtype).contiguous()))
        file.flush()
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
