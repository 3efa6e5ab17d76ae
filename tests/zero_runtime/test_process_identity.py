"""A process is identified by its pid and start time, and changes of the wall clock do not affect the start time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zero_runtime import process_identity
from zero_runtime.process_identity import (
    boot_id,
    has_ended,
    has_proc,
    mark,
    own_age_s,
    process_stat,
    remove_left_behind,
    started,
)

pytestmark = pytest.mark.skipif(not has_proc(), reason="this system has no /proc")


def test_a_process_keeps_a_unique_token_until_it_ends() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    token = started(child.pid)
    assert token == started(child.pid)
    assert token not in (None, started(1))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: not yet reaped by its parent
    assert process_stat(child.pid) is not None
    assert started(child.pid) is None
    child.wait()
    assert started(child.pid) is None


def test_the_token_names_the_boot_so_no_process_matches_one_from_before_a_reboot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = started(os.getpid())
    assert before is not None
    assert before.endswith(f"@{boot_id()}")
    monkeypatch.setattr(process_identity, "boot_id", lambda: "another")
    assert started(os.getpid()) != before


def test_the_age_of_this_process_does_not_depend_on_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_age_s()
    assert before > 0
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= own_age_s()


def ended_mark() -> str:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = mark(child.pid)
    child.kill()
    child.wait()
    return found


def test_has_ended_is_true_only_if_the_process_is_known_to_have_ended() -> None:
    own = mark()
    host, boot, space, pid, ticks = own.split(".")
    assert not has_ended(f"file-{own}.tmp")
    assert has_ended(f"file-{ended_mark()}.tmp")
    assert has_ended(f"file-{host}.{boot}.{space}.{pid}.{int(ticks) + 1}.tmp"), "the pid is another process's now"
    assert has_ended(f"file-{host}.{'0' * 8}.{space}.{pid}.{ticks}.tmp"), "the machine was started again since"
    for other in (f"{'0' * 8}.{boot}.{space}.1.0", f"{host}.{boot}.{int(space) + 1}.1.0", "no mark", "1234"):
        assert not has_ended(f"file-{other}.tmp"), "of another machine, another container or an unknown program"


def test_a_file_of_several_processes_is_removed_after_the_last_of_them_has_ended(tmp_path: Path) -> None:
    dead = ended_mark()
    paths = [tmp_path / f"{dead}_{mark()}", tmp_path / f"{dead}_{dead}", tmp_path / dead, tmp_path / "unmarked"]
    for path in paths[:2]:
        path.mkdir()
        (path / "file").touch()
    for path in paths[2:]:
        path.touch()
    assert remove_left_behind(paths) == paths[1:3]
    assert sorted(tmp_path.iterdir()) == sorted([paths[0], paths[3]])
