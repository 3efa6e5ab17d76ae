"""Reads the prompts and responses of JSON files, also of compressed ones, and of tables. Imports no torch: the command
line checks the first record with it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from orchestrator.wings.pairs import tables
from orchestrator.wings.pairs.conversation import COLUMNS, Pair, pair_of
from orchestrator.workloads.text_files import TABLES, text_files

PLACE = re.compile(r"(?:rank \d+: )?(?:\w+Error: )?(\S.*, (?:line|record|row) \d+): expected ")
JSON_FILES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file, or of the files of a folder in path order. ValueError if a record is no pair.

    A file is a JSON array of objects, has an object in each line, or is a table of Parquet or Arrow.
    conversation.py has the keys of an object. What follows the last answer that is trained is left out.
    """
    found = [pair for file in pair_files(path) for pair in _pairs(file)]
    if not found:
        raise ValueError(f"data.path: expected prompts and responses, found none in {path}; name another file")
    return found


def pair_files(path: Path) -> list[Path]:
    """The file itself; of a folder the tables, or else the files of JSON, in path order."""
    return [file for file in text_files(path) if file == path or file.name.endswith((*JSON_FILES, *TABLES))]


def _pairs(path: Path) -> Iterator[Pair]:
    if tables.is_table(path):
        yield from (pair_of(place, row) for place, row in tables.rows(path, COLUMNS))
        return
    try:
        with opened(path) as file:
            text = file.read().decode()
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"data.path: expected JSON in UTF-8, found other bytes in {path}: {error}") from None
    if text.lstrip()[:1] == "[":
        for number, record in enumerate(parsed(str(path), text), start=1):
            yield pair_of(f"{path}, record {number}", record)
        return
    # A text may hold other characters at which splitlines would divide it.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield pair_of(place, parsed(place, line))


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked if its name ends in .gz."""
    return cast("BinaryIO", gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")


def place_to_mend(message: str) -> str:
    """The file and the place in it of the wrong record that an error names; empty if it names none."""
    found = PLACE.match(message)
    return found[1] if found else ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for at, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:at]))
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def parsed(place: str, text: str | bytes) -> Any:
    """The JSON of a record. ValueError if it is none, or if an object in it has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{place}: expected a JSON array of objects, or an object in each line, found another text ({why})"
        ) from None
