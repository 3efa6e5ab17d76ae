"""What we write is its owner's alone: how it is made so, and whether a folder that is there already may be trusted.

Who may write into a folder, or rename it away, decides what a process finds there. Three rules say when a folder is
trusted; the caller says how far they go.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWN_UMASK = 0o077


@contextmanager
def for_the_owner_alone() -> Iterator[None]:
    """What this process writes inside, and the processes that it starts inside, nobody else may read."""
    before = os.umask(OWN_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def trouble_of_private(folder: Path) -> str | None:
    """Why what lies in a folder is not its user's alone; None where it is: it is ours, and writable to nobody else.

    For what is loaded into a process.
    """
    return _trouble(folder, others=stat.S_IWGRP | stat.S_IWOTH, roots=False)


def trouble_of_own(folder: Path) -> str | None:
    """Why a folder of results is not to be trusted; None where it is: it is ours or root's, and not everybody's to
    write to. A group that may write to it is one that somebody chose. What is not there is no trouble."""
    return _trouble(folder, others=stat.S_IWOTH, roots=True) if folder.is_dir() else None


def trouble_of_parents(folder: Path) -> str | None:
    """Why somebody else could put another folder in the place of this one; None where only root, the parents' owners
    and their groups can. Everybody may write to /tmp, yet rename nothing there: it is sticky."""
    for parent in folder.parents:
        if not parent.is_dir():
            continue
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"{parent} is writable to everybody ({stat.filemode(mode)})"
    return None


def _trouble(folder: Path, others: int, *, roots: bool) -> str | None:
    status = folder.stat()
    mode = stat.filemode(status.st_mode)
    if status.st_uid not in ((os.getuid(), 0) if roots else (os.getuid(),)):
        return f"{folder} belongs to user {status.st_uid} ({mode}), and this is user {os.getuid()}"
    if status.st_mode & others:
        return f"{folder} is writable to others ({mode})"
    return None
