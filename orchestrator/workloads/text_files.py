"""Selects and orders the files of a text. Imports neither numpy nor torch, because the command line uses it too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

TABLES = (".parquet", ".arrow")  # ends of names of files with rows
READ_AS_RECORDS = (".jsonl", ".jsonl.gz", ".txt.gz", *TABLES)  # of files that are not read as they are
_LOOK_BYTES = 8192


def text_files(path: Path) -> list[Path]:
    """The file itself, or the regular files under a folder in path order, without hidden ones: the tables alone if
    there are any, since what lies beside them (a card, settings of `datasets`) is no text to learn."""
    if not path.is_dir():
        return [path]
    listed = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        listed += [Path(folder, name) for name in files if not name.startswith(".")]
    regular = [file for file in listed if file.is_file()]  # reading a pipe would block; a broken link is unreadable
    # `datasets` keeps the results of its maps in cache-*.arrow beside the data.
    tables = [file for file in regular if file.name.endswith(TABLES) and not file.name.startswith("cache-")]
    return sorted(tables or regular, key=lambda file: file.relative_to(path).as_posix())


def is_text(file: BinaryIO) -> bool:
    """Whether an open file has no NUL in its first 8 KiB (git's rule), or a name of READ_AS_RECORDS. Sets the position
    to the start of the file."""
    start = file.read(_LOOK_BYTES)
    file.seek(0)
    return b"\0" not in start or str(file.name).endswith(READ_AS_RECORDS)
