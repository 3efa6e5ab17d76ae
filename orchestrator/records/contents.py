"""Hashes the contents of the files that a point reads: the text of data.path, the weights and tokenizer of model.path,
and the code of resources.code.

A file is read if it is new or has changed: its SHA-256 and its stamp are kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.pretrained import ADAPTER, WEIGHTS, companions, tokenizer_folder
from orchestrator.machine.provenance import sources
from orchestrator.records.cache import read_cached, write_cached
from orchestrator.workloads.text_files import is_text, text_files

# The kinds of contents, and their name in messages.
PLACES = {"data": "data", "model": "weights", "adapter": "adapters", "tokenizer": "tokenizer", "code": "code"}
BLOCK_BYTES = 1 << 20
READERS = 4  # files read at the same time; hashing takes a core per file and releases the GIL
SETTLED_NS = 2 * 10**9  # the coarsest clock of a file system
NO_TEXT = "no text"

Stamp = list[int]
Known = dict[tuple[str, str], str]


def of(config: Mapping[str, Any], known: Known | None = None) -> dict[str, str]:
    """A hash of the contents of each of PLACES that the configuration reads. Only files that changed are read.

    known: answers of earlier calls, used and extended; pass the same one for all points of a plan. Files that cannot be
    read get a text that says so instead of a hash: the run that needs them reports the problem.
    """
    known = {} if known is None else known
    hashes = {}
    for name, path in _wanted(config).items():
        if (name, path) not in known:
            known[name, path] = _hash_of(name, Path(path))
        hashes[name] = known[name, path]
    return hashes


def place(name: str, config: Mapping[str, Any]) -> str:
    """A name for messages, such as "the data at /here/text.txt"."""
    return f"the {PLACES[name]} at {_wanted(config)[name]}"


def _wanted(config: Mapping[str, Any]) -> dict[str, str]:
    data, model = config["data"], config["model"]
    paths = {"data": data["path"], "model": model["path"], "adapter": model["adapter"]}
    folder = tokenizer_folder(model["path"], model["adapter"])
    paths["tokenizer"] = str(folder) if folder is not None and data["tokenizer"] == "model" else None
    paths["code"] = config["resources"]["code"]
    return {name: path for name, path in paths.items() if path is not None}


def _files(name: str, path: Path) -> list[Path]:
    if name == "data":
        return text_files(path)
    if name == "tokenizer":
        return companions(path)
    if name == "code":
        return sources(path)
    files = (*path.glob("*.safetensors"), *path.glob(ADAPTER), *(path / name for name in WEIGHTS[1:]))
    return sorted(file for file in files if file.is_file())


def _hash_of(name: str, path: Path) -> str:
    """16 hexadecimal digits: a hash of the files' hashes in order, and of their names unless they are data."""
    try:
        files = _files(name, path)
        digests = _digests(name, path, files)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    parts = [digest for digest in digests if digest != NO_TEXT]
    if name != "data":
        parts = [f"{file.relative_to(path)} {digest}" for file, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _digests(name: str, path: Path, files: Sequence[Path]) -> list[str]:
    """The hash of each file, from the cache if the file has not changed."""
    from concurrent.futures import ThreadPoolExecutor  # here: a typo is reported without this import

    key = hashlib.sha256(f"{name} {path.absolute()}".encode()).hexdigest()[:16]
    known: dict[str, tuple[Stamp, str]] = {
        file: (stamp, digest) for file, (stamp, digest) in (read_cached("contents", key) or {}).items()
    }
    begun = time.time_ns()
    # A file that data.path names directly is always read; in a folder only text files are.
    skips = name == "data" and files != [path]

    def digest(file: Path) -> tuple[Stamp, str]:
        before, stamp = known.get(str(file)), _stamp(file)
        return before if before is not None and before[0] == stamp else _read_digest(file, skips=skips)

    with ThreadPoolExecutor(READERS) as readers:
        digests = dict(zip(map(str, files), readers.map(digest, files), strict=True))
    # A file that changed a moment ago could change again within one tick of the file system's clock.
    settled = {file: entry for file, entry in digests.items() if max(entry[0][-2:]) < begun - SETTLED_NS}
    if settled != known:
        write_cached("contents", key, settled)
    return [text for _, text in digests.values()]


def _stamp(file: Path | int) -> Stamp:
    stat = os.stat(file)
    # Programs cannot set the change time, so a file that was overwritten and given its old modification time is read
    # again.
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_digest(path: Path, *, skips: bool) -> tuple[Stamp, str]:
    """The hash of a file, or NO_TEXT, and the stamp that the file had before it was read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        stamp = _stamp(file.fileno())
        if skips and not is_text(file):
            return stamp, NO_TEXT
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return stamp, digest.hexdigest()
