"""Selects and orders the files of a text. Imports neither numpy nor torch, because the command line uses it too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_LOOK_BYTES = 8192


def text_files(path: Path) -> list[Path]:
    """The file itself, or the regular files under a folder in path order, without hidden ones."""
    if not path.is_dir():
        return [path]
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = [one for one in folders if not one.startswith(".")]
        found += [Path(folder, one) for one in files if not one.startswith(".")]
    regular = [one for one in found if one.is_file()]  # reading a pipe would block; a broken link is unreadable
    return sorted(regular, key=lambda one: one.relative_to(path).as_posix())


def is_text(file: BinaryIO) -> bool:
    """Whether an open file has no NUL in its first 8 KiB (git's rule). Sets the position to the start of the file."""
    start = file.read(_LOOK_BYTES)
    file.seek(0)
    return b"\0" not in start
