"""Reads a folder of weights in the Hugging Face format, by range.

Only safetensors files are read. `pytorch_model.bin` is a pickle: the error describes how to convert it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from zero_runtime.checkpoint.files import WEIGHTS, WEIGHTS_INDEX, read_index
from zero_runtime.checkpoint.tensor_file import TensorFile
from zero_runtime.errors import CheckpointError, some
from zero_runtime.tensor_source import TensorSource


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


class Renamed:
    """Some tensors of a source under other names: a TensorSource."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = dict(names)  # ours: theirs

    def names(self) -> Sequence[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._names[name])

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._source.read(self._names[name], start, stop)


def match_names(own: Mapping[str, Sequence[str]], theirs: Iterable[str], where: str) -> dict[str, str]:
    """Map our parameter names to the names in `theirs`: {ours: theirs}.

    `own`: by parameter, the names that it may have there, in order of preference. CheckpointError if a parameter has no
    match, or if `theirs` has names that match no parameter: unused weights are a sign of another architecture.
    """
    left = dict.fromkeys(theirs)
    known = {alias for aliases in own.values() for alias in aliases}
    found = {name: next((alias for alias in aliases if alias in left), None) for name, aliases in own.items()}
    missing = [name for name, alias in found.items() if alias is None]
    extra = [name for name in left if name not in known]
    if missing or extra:
        raise CheckpointError(
            f"{where}: another architecture: expected the {len(own)} tensors of this model, found {len(left)}; it "
            f"lacks {some(missing)} and has {some(extra)} too many; give the folder of a model of this class, whose "
            "names save_pretrained left as they are in the model"
        )
    return {name: alias for name, alias in found.items() if alias is not None}
