"""Values in the user's cache that can be computed again: a missing, damaged or unwritable file is no error."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.records.record_file import CHECKSUM, BadRecord, judged, loaded, write_json_atomic
from zero_runtime.kernels.cpu.build import BuildError, cache_folder


def cache_file(folder: str, key: str) -> Path:
    """The file of a value, in a folder that is private to the user. OSError if the folder cannot be created."""
    try:
        path = cache_folder() / folder
    except BuildError as error:
        raise OSError(str(error)) from error
    path.mkdir(mode=0o700, exist_ok=True)
    return path / f"{key}.json"


def read_cached(folder: str, key: str) -> Any | None:
    """The value that `write_cached` stored for this key; None if there is none, or if the file is damaged."""
    with suppress(BadRecord, OSError):
        path = cache_file(folder, key)
        data = loaded(path)
        if isinstance(data, dict) and CHECKSUM in data and judged(path, data, {}).get("key") == key:
            return data.get("kept")
    return None


def write_cached(folder: str, key: str, value: object) -> None:
    """Stores the value for `read_cached`. If that fails, nothing is raised: it is computed again next time."""
    with suppress(OSError):
        write_json_atomic(cache_file(folder, key), {"key": key, "kept": value})
