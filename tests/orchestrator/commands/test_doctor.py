"""doctor says what a machine with GPUs lacks before the first run does, and names the build of torch."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.commands import doctor
from orchestrator.machine import hardware, provenance
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


@pytest.mark.parametrize("reason", ["", "processes may not read each other's memory here"])
def test_the_way_in_which_cpu_ranks_communicate_is_told_with_the_reason(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "load", lambda _: lambda: reason)
    found = doctor._cpu_ranks()
    assert ("gloo" in found.text, "shm" in found.text) == (bool(reason), not reason)
    assert found.advice.startswith(reason)
    assert bool(found.advice) == bool(reason)


def test_torch_is_named_with_its_build_in_doctor_and_in_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    here = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: here)
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")  # PyPI's packages say no more
    assert provenance.facts()["packages"]["torch"] == "2.13.0+cu130"
    assert "torch 2.13.0+cu130, transformers 2.13.0," in doctor._packages()[0].text
