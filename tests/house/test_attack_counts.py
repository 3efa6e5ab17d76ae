"""Counts of attacks and of checks are added up over all pytest processes, including the counts of failed tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SUITE = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_some(number, tally, checked):
    tally("lines", inputs=600, wrong_exit_codes=0)
    tally("lines", inputs=1)
    tally("kills", kills=2, processes_left=int(number == 2))
    checked("rows", cases=7)
    assert number != 2
"""


@pytest.mark.full
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.full), "2"])
def test_counts_of_all_processes_are_added_and_printed(tmp_path: Path, workers: str) -> None:
    tmp_path.joinpath("test_suite.py").write_text(SUITE)
    tmp_path.joinpath("pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "harness.attack_counts", "-n", workers]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith(("attack: ", "checked: "))] == [
        "attack: kills: 6 kills, 1 processes left",
        "attack: lines: 1,803 inputs, 0 wrong exit codes",
        "checked: rows: 21 cases",
        "attack: in all: 6 kills, 1 processes left, 1,803 inputs, 0 wrong exit codes",
    ]
