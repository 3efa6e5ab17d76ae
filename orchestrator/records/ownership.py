"""Restricts files that we write to their owner, and checks whether an existing output folder can be trusted.

Any user who can write into a folder, or rename it, controls the files that a process reads there.
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
    """Files created in this context, also by processes started in it, are accessible only to this user."""
    before = os.umask(OWN_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def trouble_of_own(folder: Path) -> str | None:
    """Why a folder of results cannot be trusted; None if this user or root owns it and not all users can write to it.

    A group may write to it, since somebody chose that group. Also None if the folder does not exist.
    """
    if not folder.is_dir():
        return None
    status = folder.stat()
    mode = stat.filemode(status.st_mode)
    if status.st_uid not in (os.getuid(), 0):
        return f"{folder} belongs to user {status.st_uid} ({mode}), and this is user {os.getuid()}"
    return f"{folder} is writable to others ({mode})" if status.st_mode & stat.S_IWOTH else None


def trouble_of_parents(folder: Path) -> str | None:
    """Why any user could replace this folder with another; None if only root, the parents' owners and groups can.

    All users may write to /tmp, but they cannot rename other users' files there, since its sticky bit is set.
    """
    for parent in folder.parents:
        if not parent.is_dir():
            continue
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"{parent} is writable to everybody ({stat.filemode(mode)})"
    return None
