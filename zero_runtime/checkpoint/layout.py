"""The index of a checkpoint: which file holds which elements of which state of which parameter. Standard library only.

Names of files and folders are spelled here alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_runtime.errors import CheckpointError

FORMAT, VERSION = "zero-lab checkpoint", 1
INDEX = "index.json"
_PREFIX = "step-"
KEY = "{state}/{name}"  # of a tensor in a rank's file


def folder_of(root: Path, step: int) -> Path:
    """A whole checkpoint: it gets this name by the rename that commits it."""
    return root / f"{_PREFIX}{step:08d}"


def partial_of(root: Path, step: int) -> Path:
    """A checkpoint that is being written, or whose writing was cut off."""
    return root / f".{_PREFIX}{step:08d}.partial"


def step_of(folder: Path) -> int | None:
    """The step of a whole checkpoint's folder; None for any other folder."""
    digits = folder.name.removeprefix(_PREFIX)
    return int(digits) if folder.name.startswith(_PREFIX) and digits.isdigit() else None


def file_of(rank: int, world: int) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def report_of(rank: int) -> str:
    """What a rank tells the one that commits: there when its file is on the disk."""
    return f"rank-{rank:05d}.json"


def failure_of(rank: int) -> str:
    """Empty, so that it can be made on a full disk: this rank's file will not come."""
    return f"rank-{rank:05d}.failed"


@dataclass(frozen=True)
class FileEntry:
    """One rank's file. slices: by `state/name`, elements [start, stop) of the flattened parameter."""

    bytes: int
    crc32: int
    slices: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class ParameterEntry:
    """dtypes: by state, as safetensors spells them."""

    shape: tuple[int, ...]
    trainable: bool
    dtypes: dict[str, str]


@dataclass(frozen=True)
class Index:
    """What index.json says. All of it is plain data.

    optimizer: `name`, `states` in order, `counters` by name. runtime: `loss_scaler` and `rng` (by rank, base64).
    trainer: whatever the caller of the save gave. tied: other names of a parameter, to the one that it goes by here.
    """

    step: int
    world: int
    parameters: dict[str, ParameterEntry]
    tied: dict[str, str]
    files: dict[str, FileEntry]
    optimizer: dict[str, Any]
    runtime: dict[str, Any]
    trainer: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Index:
        """CheckpointError where there is no index, or none of this format and version."""
        path = folder / INDEX
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder}: expected a checkpoint, found no {INDEX} in it{_unfinished(folder)}; give the folder of one "
                f"checkpoint ({_PREFIX}...)"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path}: could not be read: {error}; give it back its permissions") from error
        try:
            data = json.loads(text)
            kind, version = data.pop("format"), data.pop("version")
            if (kind, version) != (FORMAT, VERSION):
                raise CheckpointError(
                    f"{path}: expected '{FORMAT}' version {VERSION}, found '{kind}' version {version}; load it with "
                    "the version of this project that wrote it"
                )
            data["files"] = {name: _file_entry(entry) for name, entry in data["files"].items()}
            data["parameters"] = {name: _parameter_entry(entry) for name, entry in data["parameters"].items()}
            return cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: expected the index of a checkpoint, found something else ({type(error).__name__}: {error}); "
                "the file is damaged: take an older checkpoint"
            ) from error


def _unfinished(folder: Path) -> str:
    return " (it is still being written, or its writing was cut off)" if folder.name.endswith(".partial") else ""


def _file_entry(entry: dict[str, Any]) -> FileEntry:
    slices = {key: (int(start), int(stop)) for key, (start, stop) in entry["slices"].items()}
    return FileEntry(int(entry["bytes"]), int(entry["crc32"]), slices)


def _parameter_entry(entry: dict[str, Any]) -> ParameterEntry:
    return ParameterEntry(tuple(entry["shape"]), bool(entry["trainable"]), dict(entry["dtypes"]))
