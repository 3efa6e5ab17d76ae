"""Reads a folder of weights in the Hugging Face format, by range.

Only safetensors files are read. `pytorch_model.bin` is a pickle: the error describes how to convert it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from zero_runtime.checkpoint.files import WEIGHTS, WEIGHTS_INDEX, read_index
from zero_runtime.checkpoint.tensor_file import TensorFile
from zero_runtime.errors import CheckpointError


class WeightsFolder:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names: a TensorSource.

    Opening it reads only the index and the files' headers; CheckpointError if a file is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, TensorFile] = {}
        try:
            self._file_of = dict(self._read_places())
        except BaseException:
            self.close()
            raise

    def _read_places(self) -> Iterable[tuple[str, str]]:
        if (self.path / WEIGHTS_INDEX).exists():
            places = read_index(self.path)
            for file in dict.fromkeys(places.values()):
                self._files[file] = TensorFile(self.path / file)
            for name, file in places.items():
                self._files[file].place(name)  # raises if the file lacks it
                yield name, file
            return
        if not (self.path / WEIGHTS).exists():
            raise CheckpointError(self._nothing_here())
        self._files[WEIGHTS] = TensorFile(self.path / WEIGHTS)
        yield from dict.fromkeys(self._files[WEIGHTS].keys(), WEIGHTS).items()

    def _nothing_here(self) -> str:
        wanted = f"{self.path}: expected {WEIGHTS} or {WEIGHTS_INDEX}"
        if not self.path.is_dir():
            return f"{wanted} in it, found {'a file' if self.path.exists() else 'nothing'}; give the folder of a model"
        if any(self.path.glob("pytorch_model*.bin")):
            return (
                f"{wanted}, found pytorch_model.bin, a pickle; convert it once: transformers' "
                "from_pretrained(...).save_pretrained(another folder)"
            )
        return f"{wanted}, found neither; give the folder that save_pretrained wrote"

    def names(self) -> Sequence[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[self._file_of[name]].place(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._files[self._file_of[name]].place(name).dtype

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=self.dtype(name))
        self._files[self._file_of[name]].read_into(name, start, values)
        return values

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far; headers are not counted."""
        return sum(file.bytes_read for file in self._files.values())

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> WeightsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
