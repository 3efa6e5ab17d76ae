"""A rank's folder in the machine's temporary folder is removed with its job, even if the job was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zero_runtime.process_identity import has_proc, mark
from zero_runtime.watch.process import OwnProcess


@pytest.mark.skipif(not has_proc(), reason="this system has no /proc")
def test_the_next_start_removes_the_folders_of_killed_jobs_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = mark(child.pid)
    child.kill()
    child.wait()
    killed = tmp_path / f"zero_rank_{dead}_{dead}_abc"
    read_by_others = tmp_path / f"zero_rank_{dead}_{mark(os.getpid())}_abc"  # its launcher still lives; peers may too
    other = tmp_path / f"zero_rank_{mark(os.getpid())}_{dead}_abc"
    for folder in (killed, read_by_others, other):
        folder.mkdir()
        (folder / "journal").touch()
    process = OwnProcess()
    own = Path(process.whereabouts.folder)
    assert set(tmp_path.iterdir()) == {read_by_others, other, own}
    process.close()
    assert set(tmp_path.iterdir()) == {read_by_others, other}
