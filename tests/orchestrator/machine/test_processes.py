"""Whether a process is alive is decided by a token that clock steps do not change and that old records lack."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from orchestrator.machine.processes import is_alive, started
from zero_runtime.process_identity import has_proc


@pytest.mark.skipif(not has_proc(), reason="without /proc the system keeps the start as the clock told it then")
@pytest.mark.parametrize("step_s", [2.0, -2.0, 7200.0, -7200.0])
def test_a_living_process_is_recognized_after_a_clock_step(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    token = started(os.getpid())
    now, boot_time, created = time.time, psutil.boot_time, psutil.Process.create_time
    monkeypatch.setattr(time, "time", lambda: now() + step_s)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + step_s)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) + step_s)
    assert is_alive(os.getpid(), token)


@pytest.mark.parametrize("token", [1700000000.25, None, "", "1700000000.25"])
def test_a_record_without_a_valid_token_counts_as_an_ended_process(token: object) -> None:
    assert not is_alive(os.getpid(), token)
