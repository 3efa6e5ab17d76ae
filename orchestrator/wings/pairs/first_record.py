"""Looks at the first records of each file of data, so that a wrong file is refused before anything starts."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.config.strict import Broken
from orchestrator.wings.pairs.conversation import COLUMNS, CONVERSATIONS, MESSAGES, PAIR_KEYS, pair_of
from orchestrator.wings.pairs.pairs_file import JSON_FILES, opened, pair_files, parsed
from orchestrator.wings.pairs.tables import ROWS, is_table, rows
from orchestrator.wings.pairs.text_records import LINES, TEXT, text_record
from orchestrator.workloads.text_files import READ_AS_RECORDS, TABLES, text_files

LOOK_BYTES = 1 << 20  # of each file; the ranks judge the records after them, and one that is longer
PAIRS = "pairs"
MOST_FILES = 16  # of a folder, whose first records are checked: one may have thousands
SPLIT = re.compile(
    r"(train|validation|valid|val|test|dev|eval)(?![a-z])"
)  # starts the names of the parts of a data set


def problem(path: Path, kind: str, *, templated: bool = True) -> Broken | None:
    """Report a fault in the first records of data.path, a file or a folder that is there; None if it has none, or if it
    cannot be told from the first bytes. templated: whether a chat template writes pairs."""
    stat = path.stat()
    return _problem(path, kind, templated, (stat.st_mtime_ns, stat.st_size))


@lru_cache  # each point of a sweep asks
def _problem(path: Path, kind: str, templated: bool, stamp: tuple[int, int]) -> Broken | None:
    try:
        files = pair_files(path) if kind == PAIRS else text_files(path)
        if not files and kind == PAIRS:
            fix = "data=text" if text_files(path) else "data=stdlib data.path=null"
            ends = ", ".join((*JSON_FILES, *TABLES))
            return Broken(f"data.path must be a folder with files of {ends}", f"none in {path}", (fix,))
        if files and (kind == PAIRS or is_table(files[0])) and (split := _one_split(path, files)):
            return split
        is_empty = len(files) <= MOST_FILES
        for file in files[:MOST_FILES]:
            if kind == PAIRS or file.name.endswith(LINES) or is_table(file):
                for place, record in _records(file, kind):
                    is_empty = False
                    _judge(place, record, kind, templated)
                continue
            is_empty = is_empty and not file.stat().st_size
            if file == path and file.name.endswith(".gz") and not file.name.endswith(READ_AS_RECORDS):
                raise ValueError(f"{file}: expected text, {' or '.join(READ_AS_RECORDS)}, found another .gz")
        if is_empty:
            return Broken("data.path must be a file or a folder with records or text", f"none in {path}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        return Broken(f"data.path: expected a compressed file in {path}", f"another: {error}")
    except OSError:
        return None  # the ranks say why it cannot be read
    except _WrongRecord as error:
        return Broken(*_rule(error), error.fix)
    except ValueError as error:
        return Broken(*_rule(error))
    return None


class _WrongRecord(ValueError):
    def __init__(self, text: str, record: Any, kind: str) -> None:
        super().__init__(text)
        keys = {key for key, value in record.items() if value is not None} if isinstance(record, dict) else set()
        is_pair = MESSAGES in keys or CONVERSATIONS in keys or any(set(pair) <= keys for pair in PAIR_KEYS)
        self.fix = ("data=text",) if kind == PAIRS and TEXT in keys else ("data=pairs",) if is_pair else ()
        if kind == PAIRS and is_pair:
            self.fix = ()


def _rule(error: ValueError) -> tuple[str, str]:
    rule, _, found = str(error).partition(", found ")
    return f"data.path: {rule.removeprefix('data.path: ')}", found


def _one_split(folder: Path, files: Sequence[Path]) -> Broken | None:
    """Why the files of a folder must not be trained on together; None if they are no parts such as train and test."""
    parts: dict[str, Path] = {}
    several = set()
    for file in files:
        place = folder
        for name in file.relative_to(folder).parts if file != folder else ():
            place /= name
            if found := SPLIT.match(name):
                if parts.setdefault(found[1], place) != place:
                    several.add(found[1])
                break
    if len(parts) < 2:
        return None
    fixes = tuple(f"data.path={place}" for name, place in parts.items() if name not in several)
    rule = "data.path must be one part of a data set, as training on its test part makes every measure of it wrong"
    return Broken(rule, f"{', '.join(parts)} in {folder}; a folder of its own for each part", fixes)


def _records(path: Path, kind: str) -> Iterator[tuple[str, Any]]:
    """The records in the first bytes of a file with their places: all that end there. The first rows of a table; only
    the first one of a longer array. None for a longer file whose first one does not end there."""
    if is_table(path):
        yield from itertools.islice(rows(path, (*COLUMNS, TEXT)), ROWS)
        return
    with opened(path) as file:
        start = file.read(LOOK_BYTES)
    whole, text = len(start) < LOOK_BYTES, start.decode(errors="replace")
    if kind == PAIRS and text.lstrip().startswith("["):
        if whole:
            yield from ((f"{path}, record {at}", one) for at, one in enumerate(parsed(str(path), text), start=1))
            return
        with suppress(ValueError, RecursionError):
            yield f"{path}, record 1", json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]
            return
    else:
        lines = text.split("\n") if whole else text.split("\n")[:-1]
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield (place := f"{path}, line {number}"), parsed(place, line)
    if not whole:
        yield str(path), None


def _judge(place: str, record: Any, kind: str, templated: bool) -> None:
    if record is None:
        return
    try:
        if kind != PAIRS:
            text_record(place, record)
        elif not templated:
            pair_of(place, record).check_plain()
        else:
            pair_of(place, record)
    except ValueError as error:
        raise _WrongRecord(str(error), record, kind) from None
