"""A command finds out, without torch, whether ranks may read each other, and says why they may not."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from zero_runtime.same_host import peer_memory, probe


def test_processes_that_are_permitted_read_each_other_without_torch() -> None:
    """Where this machine forbids it, the reason is told, and the ranks of other tests use gloo."""
    code = "import sys; from zero_runtime.same_host import probe; print(probe.trouble(), 'torch' in sys.modules)"
    words = [sys.executable, "-c", code]
    found = subprocess.run(words, capture_output=True, encoding="utf-8", check=True, cwd=probe._ROOT)
    assert found.stdout in (" False\n", f"{probe.trouble()} False\n")
    assert probe.trouble() == "" or peer_memory.NEEDS in probe.trouble()


@pytest.mark.parametrize(
    ("address", "expected", "told"),
    [
        (0, 7, f"memory here (process_vm_readv: Bad address); {peer_memory.NEEDS}"),
        (None, 8, "a process read 7 from another one's memory, expected 8"),
        (None, 7, ""),
    ],
)
def test_what_hinders_a_read_is_told(
    address: int | None, expected: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if peer_memory.trouble():
        pytest.skip(peer_memory.trouble())
    number = ctypes.c_uint64(7)
    place = ctypes.addressof(number) if address is None else address
    monkeypatch.setattr(sys, "argv", ["probe", str(os.getpid()), str(place), str(expected)])
    probe.read()
    assert capsys.readouterr().out.strip().endswith(told)


def test_a_system_without_the_call_is_named_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_LIBC", None)
    assert probe.trouble.__wrapped__() == "this system has no process_vm_readv (Linux has)"
