"""Writes a folder of weights in the Hugging Face format: sharded safetensors files with an index, nothing else.

Names are those of the model. A tied parameter is written once, under the name of its owner, as `save_pretrained` does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from zero_runtime.checkpoint.tensor_file import bytes_of, fsync_folder, header_of
from zero_runtime.errors import CheckpointError
from zero_runtime.tensor_source import TensorSource

MODEL = "model"  # file name prefix of a model's own weights
MAX_FILE_BYTES = 5 * 10**9  # the default that save_pretrained uses
BLOCK_NUMEL = 4 << 20  # elements in memory at a time


class Written(NamedTuple):
    """The contents of a written folder: number of tensors, their bytes, and the file names in order."""

    tensors: int
    bytes: int
    files: tuple[str, ...]


def write_weights(
    source: TensorSource,
    out: str | Path,
    *,
    dtype: torch.dtype,
    stem: str = MODEL,
) -> Written:
    """Write all weights of `source`, cast to `dtype`, into the new folder `out`, which appears once it is complete.

    Memory: BLOCK_NUMEL elements, regardless of tensor sizes. CheckpointError if `out` exists or cannot be written.
    """
    shapes = {name: source.shape(name) for name in source.names()}
    with FolderWriter(out, shapes, dtype, stem) as writer:
        for name, shape in shapes.items():
            numel = math.prod(shape)
            for start in range(0, numel, BLOCK_NUMEL):
                writer.put(source.read(name, start, min(start + BLOCK_NUMEL, numel)))
        return writer.commit()


class FolderWriter:
    """Takes the elements of all tensors in order and writes the folder; leaving it without `commit` discards the files.

    Every method raises CheckpointError if the disk fails; `out` then does not exist.
    """

    def __init__(
        self,
        out: str | Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        stem: str = MODEL,
    ) -> None:
        self._out = Path(out)
        if self._out.exists():
            raise CheckpointError(
                f"{self._out}: expected a folder that is not there yet, found one; give another, or remove it"
            )
        self._shapes, self._dtype, self._stem = dict(shapes), dtype, stem
        self._groups = list(self._grouped())
        count = len(self._groups)
        self._names = [
            f"{stem}.safetensors" if count == 1 else f"{stem}-{place + 1:05d}-of-{count:05d}.safetensors"
            for place in range(count)
        ]
        self._partial = self._out.with_name(f".{self._out.name}.partial")
        self._file: BinaryIO | None = None
        self._opened = 0  # number of files opened so far
        self._left = 0  # bytes still missing in the open file
        with self._disk():
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def put(self, values: torch.Tensor) -> None:
        """Append the next elements: 1-D, of one tensor, on any device and in any dtype."""
        if values.numel() == 0:
            return
        with self._disk():
            while self._left == 0:
                self._next_file()
            assert self._file is not None
            self._file.write(bytes_of(values.to("cpu", self._dtype).contiguous()))
            self._left -= values.numel() * self._dtype.itemsize
            assert self._left >= 0, "tensors came in another order than their shapes"

    def commit(self) -> Written:
        """Complete the files and rename the folder to `out`, after all elements were put."""
        with self._disk():
            while self._opened < len(self._names):
                self._next_file()
            self._close_file()
            total = sum(map(self._bytes, self._shapes))
            if len(self._names) > 1:
                places = {name: file for file, names in zip(self._names, self._groups, strict=True) for name in names}
                index = {"metadata": {"total_size": total}, "weight_map": places}
                _write_text(self._partial / f"{self._stem}.safetensors.index.json", json.dumps(index, indent=2) + "\n")
            fsync_folder(self._partial)
            self._partial.rename(self._out)
            fsync_folder(self._out.parent)
        return Written(len(self._shapes), total, tuple(self._names))

    def _bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * self._dtype.itemsize

    def _grouped(self) -> Iterator[list[str]]:
        """Names in order, as many per file as fit; a tensor larger than the limit has a separate file."""
        group: list[str] = []
        size = 0
        for name in self._shapes:
            own = self._bytes(name)
            if group and size + own > MAX_FILE_BYTES:
                yield group
                group, size = [], 0
            group.append(name)
            size += own
        yield group

    def _next_file(self) -> None:
        self._close_file()
        names = self._groups[self._opened]
        self._file = (self._partial / self._names[self._opened]).open("xb")
        tensors = ((name, self._dtype, self._shapes[name]) for name in names)
        self._file.write(header_of(tensors, {"format": "pt"}))  # transformers refuses a file without this
        self._left = sum(map(self._bytes, names))
        self._opened += 1

    def _close_file(self) -> None:
        assert self._left == 0, f"{self._left} bytes have not come"
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._discard()
            raise CheckpointError(
                f"{self._out}: could not be written: {error}; make room or give another folder"
            ) from error

    def _discard(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # on a full disk the final flush fails too
                self._file.close()
            self._file = None
        shutil.rmtree(self._partial, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
