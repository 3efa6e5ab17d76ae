"""The folder of what is computed once for a user: compiled kernels, and values that can be computed again.

`$XDG_CACHE_HOME/zero-lab` (or `~/.cache/zero-lab`, or `zero-lab-UID` in the folder of temporary files if there is no
writable home) is accessible only to the user (0700), because its files are loaded into processes.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


class CacheError(RuntimeError):
    """The folder cannot be used or trusted; the message gives the reason."""


def cache_folder() -> Path:
    """The folder, created if it is missing. CacheError if it cannot be used or trusted."""
    given, home = os.environ.get("XDG_CACHE_HOME"), os.path.expanduser("~")
    try:
        if given:
            return _private(Path(given, "zero-lab"))
        if os.path.isabs(home):  # expanduser returns "~" if neither HOME nor the user's entry names a home
            with suppress(OSError):
                return _writable(_private(Path(home, ".cache", "zero-lab")))
        return _private(Path(tempfile.gettempdir(), f"zero-lab-{os.getuid()}"))
    except OSError as error:
        raise CacheError(f"the cache cannot be used: {error}; set XDG_CACHE_HOME to a folder of yours") from error


def _writable(folder: Path) -> Path:
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, "cannot be written to", str(folder))
    return folder


def _private(folder: Path) -> Path:
    """The folder, created if it is missing. CacheError if other users own it or may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    mode = stat.filemode(status.st_mode)
    if status.st_uid != os.getuid():
        trouble = f"{folder} belongs to user {status.st_uid} ({mode}), and this is user {os.getuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        trouble = f"{folder} is writable to others ({mode})"
    else:
        return folder
    raise CacheError(
        f"the cache must be the user's and writable to nobody else, since what lies there is loaded: {trouble}; "
        "chmod 700 it, or set XDG_CACHE_HOME"
    )
