"""Values in the user's cache that can be computed again: a missing, damaged or unwritable file is no error.

A file is a line with its key and a hash of the rest, and the value as JSON on one line. Values may have a million
numbers: nothing waits for the disk, since a file that a crash leaves incomplete does not have its hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.records.record_file import write_text_atomic
from zero_runtime.kernels.user_cache import CacheError, cache_folder


def cache_file(folder: str, key: str) -> Path:
    """The file of a value, in a folder that is private to the user. OSError if the folder cannot be created."""
    try:
        path = cache_folder() / folder
    except CacheError as error:
        raise OSError(str(error)) from error
    path.mkdir(mode=0o700, exist_ok=True)
    return path / f"{key}.json"


class CachedObject(Mapping[str, Any]):
    """An object in the cache. Its text has been checked, and is parsed when it is first used."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    @cached_property
    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self._text)
        return values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def read_cached(folder: str, key: str) -> Any | None:
    """The value that `write_cached` stored for this key; None if there is none, or if the file is damaged."""
    text = _text(folder, key)
    return None if text is None else json.loads(text)


def read_cached_object(folder: str, key: str) -> CachedObject | None:
    """The same, if it was an object."""
    text = _text(folder, key)
    return CachedObject(text) if text is not None and text.startswith(b"{") else None


def _text(folder: str, key: str) -> bytes | None:
    """What `write_cached` wrote after the first line, unchanged."""
    with suppress(OSError):
        head, _, text = cache_file(folder, key).read_bytes().partition(b"\n")
        if head == _head(key, text):
            return text
    return None


def write_cached(folder: str, key: str, value: object) -> None:
    """Stores the value for `read_cached`. If that fails, nothing is raised: it is computed again next time."""
    text = json.dumps(value, separators=(",", ":"))
    with suppress(OSError):
        head = _head(key, text.encode()).decode()
        write_text_atomic(cache_file(folder, key), f"{head}\n{text}", lasting=False)


def _head(key: str, text: bytes) -> bytes:
    return f"{key} {hashlib.sha256(text).hexdigest()}".encode()
