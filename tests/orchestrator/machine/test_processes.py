"""Who is alive: by a token that no step of the clock moves, also against records of before."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from orchestrator.machine.processes import is_alive, started
from zero_runtime.process_identity import has_proc


@pytest.mark.skipif(not has_proc(), reason="without /proc the system keeps the start as the clock told it then")
@pytest.mark.parametrize("step_s", [2.0, -2.0, 7200.0, -7200.0])
def test_a_living_process_is_alive_after_a_step_of_the_clock(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    token = started(os.getpid())
    now, boot_time, created = time.time, psutil.boot_time, psutil.Process.create_time
    monkeypatch.setattr(time, "time", lambda: now() + step_s)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + step_s)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) + step_s)
    assert is_alive(os.getpid(), token)


@pytest.mark.parametrize("token", [1700000000.25, None, "", "1700000000.25"])
def test_a_record_of_before_tokens_is_of_a_process_that_is_gone(token: object) -> None:
    assert not is_alive(os.getpid(), token)
