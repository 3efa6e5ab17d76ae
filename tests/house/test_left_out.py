"""Tests that a run leaves out are deselected and counted, so that a skip means that something is missing here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.left_out import LONG_FORM, NO_GPU, reason_to_leave_out

TESTS = Path(__file__).resolve().parents[1]
SUITE = """
import pytest

@pytest.mark.full
@pytest.mark.parametrize("number", range(3))
def test_long(number): ...

def test_short(): ...
"""


class Marked:
    """A stand-in for a test, with the names of its marks."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.names else None


def summary_of(folder: Path, *arguments: str) -> list[str]:
    folder.joinpath("test_suite.py").write_text(SUITE)
    folder.joinpath("pytest.ini").write_text("[pytest]\nmarkers =\n    full: long\n    gpu: device\n")
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "harness.left_out", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.full
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.full), "2"])
def test_tests_of_the_long_form_are_counted_in_one_line_and_not_skipped(tmp_path: Path, workers: str) -> None:
    told = summary_of(tmp_path, "-n", workers)
    assert f"3 {LONG_FORM}" in told
    assert told[-1].startswith("1 passed")
    assert not any("SKIP" in line or "skipped" in line for line in told)


def test_the_long_form_runs_on_request_and_nothing_is_reported_as_left_out(tmp_path: Path) -> None:
    told = summary_of(tmp_path, "-n", "0", "-m", "full or not full")
    assert told[-1].startswith("4 passed")
    assert not any("left out" in line for line in told)


def test_gpu_tests_are_left_out_without_a_gpu_in_the_short_and_in_the_long_form() -> None:
    for marks, wants_long_form, has_gpu, reason in [
        (("gpu",), True, False, NO_GPU),
        (("gpu", "full"), False, False, NO_GPU),
        (("gpu",), False, True, None),
        (("gpu", "full"), False, True, LONG_FORM),
        (("full",), True, False, None),
        ((), False, False, None),
    ]:
        assert reason_to_leave_out(Marked(*marks), wants_long_form=wants_long_form, has_gpu=has_gpu) == reason
