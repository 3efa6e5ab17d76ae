"""The Triton kernels agree with the reference on CPU tensors, run by Triton's interpreter.

The interpreter must be chosen before Triton is imported, so one separate process computes all cases.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = "updates", "lamb", "moments", "streams"
HERE = Path(__file__).with_name("triton_cases.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install '.[dev]' on Linux)"
)


@cache
def differences(cells: str) -> dict[str, float]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    run = subprocess.run([sys.executable, str(HERE), cells], env=environment, cwd=ROOT, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()[-4000:]
    return pickle.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_triton_agrees_with_the_reference(case: str) -> None:
    """In a cut of the cells that covers each row, length and dtype."""
    check(case, differences("cut"))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_triton_agrees_with_the_reference_in_every_other_cell(case: str) -> None:
    check(case, differences("others"))


def check(case: str, excesses: dict[str, float]) -> None:
    found = {name: excess for name, excess in excesses.items() if name.startswith(case)}
    assert len(found) > 4
    assert {name: excess for name, excess in found.items() if not excess <= 1} == {}
