"""doctor says what a machine with GPUs lacks before the first run does."""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.commands import doctor
from orchestrator.machine import hardware
from orchestrator.machine.hardware import Hardware

LAPTOP = Hardware(cores=4, cpu="cpu")


def launcher(monkeypatch: pytest.MonkeyPatch, include: Path, gpus: int = 8) -> list[doctor.Finding]:
    monkeypatch.setattr(hardware, "detect", lambda: replace(LAPTOP, gpus=gpus, gpu="H100" if gpus else ""))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(include)})
    return doctor._launcher()


def test_what_triton_needs_to_launch_a_kernel_is_looked_for_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/usr/bin/cc")
    (missing,) = launcher(monkeypatch, tmp_path)
    assert "Python.h" in missing.text
    assert "reference is used on GPUs" in missing.advice
    (tmp_path / "Python.h").touch()
    (found,) = launcher(monkeypatch, tmp_path)
    assert not found.advice
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (missing,) = launcher(monkeypatch, tmp_path)
    assert missing.text == "no gcc"
    assert launcher(monkeypatch, tmp_path, gpus=0) == []
