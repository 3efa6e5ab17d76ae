"""Locks on files, held until they are released or the process that holds them ends, for whatever reason."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def take(path: Path, *, wait: bool) -> IO[str] | None:
    """The locked file, which is created if it is missing; closing it releases the lock.

    If another holder has the lock: blocks with `wait`, else returns None.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:  # a signal while it waits, or a file system without locks
        file.close()
        raise
    return file


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of `take`. Yields False, without the lock, if `wait` is False and another holder has it."""
    file = take(path, wait=wait)
    with file or contextlib.nullcontext():
        yield file is not None
