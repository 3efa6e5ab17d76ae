"""What a run of the suite leaves out is deselected and counted, so that a skip means that something is missing here."""

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
    """Stands in for a test: the names of its marks."""

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
def test_the_long_form_is_counted_in_one_line_and_skipped_nowhere(tmp_path: Path, workers: str) -> None:
    told = summary_of(tmp_path, "-n", workers)
    assert f"3 {LONG_FORM}" in told
    assert told[-1].startswith("1 passed")
    assert not any("SKIP" in line or "skipped" in line for line in told)


def test_who_asks_for_the_long_form_gets_it_and_no_line(tmp_path: Path) -> None:
    told = summary_of(tmp_path, "-n", "0", "-m", "full or not full")
    assert told[-1].startswith("4 passed")
    assert not any("left out" in line for line in told)


def test_a_gpu_test_is_left_out_where_there_is_no_gpu_whatever_form_is_asked_for() -> None:
    for marks, wants_long_form, has_gpu, reason in [
        (("gpu",), True, False, NO_GPU),
        (("gpu", "full"), False, False, NO_GPU),
        (("gpu",), False, True, None),
        (("gpu", "full"), False, True, LONG_FORM),
        (("full",), True, False, None),
        ((), False, False, None),
    ]:
        assert reason_to_leave_out(Marked(*marks), wants_long_form=wants_long_form, has_gpu=has_gpu) == reason
