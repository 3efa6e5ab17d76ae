"""Which files a text is made of, and in which order. Imports neither numpy nor torch: the command line asks too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_LOOK_BYTES = 8192


def text_files(path: Path) -> list[Path]:
    """The file itself, or the regular files under a folder in the order of their paths, less hidden ones."""
    if not path.is_dir():
        return [path]
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = [one for one in folders if not one.startswith(".")]
        found += [Path(folder, one) for one in files if not one.startswith(".")]
    regular = [one for one in found if one.is_file()]  # a pipe would be waited for, a broken link cannot be read
    return sorted(regular, key=lambda one: one.relative_to(path).as_posix())


def is_text(file: BinaryIO) -> bool:
    """Whether an open file has no NUL in its first 8 KiB (as git tells it). Its position afterwards is its start."""
    start = file.read(_LOOK_BYTES)
    file.seek(0)
    return b"\0" not in start
