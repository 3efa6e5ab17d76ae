"""A lock on a file is exclusive, ends with its holder, and leaves no file open if it cannot be taken."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from orchestrator.machine import locks


def open_files(path: Path) -> int:
    """The number of descriptors of this process that refer to the file."""
    links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return sum(link == str(path) for link in links)


def test_a_lock_is_exclusive_and_is_released_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locks.locked(path) as first, locks.locked(path, wait=False) as second:
        assert (first, second) == (True, False)
    with locks.locked(path, wait=False) as again:
        assert again


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), KeyboardInterrupt()])
def test_a_lock_that_fails_leaves_no_file_open(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(fcntl, "flock", fails)
    path = tmp_path / "lock"
    with pytest.raises(type(error)) as caught:
        locks.take(path, wait=True)
    assert path.exists()
    assert open_files(path) == 0, f"held open by the traceback of {caught.value!r}"
