"""The texts of files that are not plain text: the field `text` of each record, and compressed files."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from orchestrator.wings.pairs import tables
from orchestrator.wings.pairs.conversation import text_of
from orchestrator.wings.pairs.pairs_file import opened, parsed

TEXT = "text"
LINES = (".jsonl", ".jsonl.gz")


def read(path: Path) -> bytes:
    """The text of a .txt.gz; of a .jsonl, .jsonl.gz or table the texts of its records, each with a line end. ValueError
    if a record has none, or if a compressed file or a table is damaged."""
    if tables.is_table(path):
        return b"".join(_ended(text_record(place, row)) for place, row in tables.rows(path, (TEXT,)))
    try:
        with opened(path) as file:
            if not path.name.endswith(LINES):
                return file.read()
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"data.path: expected a compressed file, found another in {path}: {error}") from None
    return b"".join(
        _ended(text_record(place := f"{path}, line {number}", parsed(place, line))) for number, line in lines
    )


def text_record(place: str, record: Any) -> str:
    """The text of a record."""
    if not isinstance(record, dict) or TEXT not in record:
        found = f"the keys {', '.join(record) or 'none'}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"{place}: expected an object with {TEXT}, as data=text reads .jsonl and tables, found {found}"
        )
    return text_of(place, TEXT, record[TEXT])


def _ended(text: str) -> bytes:
    return (text if text.endswith("\n") else f"{text}\n").encode()
