"""The tests of `make gpu` pass on the virtual GPU with values, except those that are named with the reason."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.attack_counts import Tally
from harness.patience import HANG_S
from harness.virtual_gpu.build import build_guard
from harness.virtual_gpu.process import ROOT, VirtualGpu
from harness.virtual_gpu.rehearsal import NOT_REHEARSED

FILES = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


def functions(file: Path) -> list[str]:
    """The names of a file's tests, without importing it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


REHEARSED = [
    f"tests/gpu/{file.name}::{name}" for file in FILES for name in functions(file) if name not in NOT_REHEARSED
]
CUT = [one for one in REHEARSED if one.endswith("updated_parameters_return_to_the_device")]  # copies, several threads


def rehearsal(*words: str) -> dict[str, Any]:
    """The result of a rehearsal, see Result in harness/virtual_gpu/rehearsal.py."""
    settings = ["-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "harness.virtual_gpu.rehearsal", str(build_guard()), *settings, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_tests_that_are_not_rehearsed_exist_and_are_named_in_the_documentation() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert set(NOT_REHEARSED) <= {name for file in FILES for name in functions(file)}
    assert [name for name in NOT_REHEARSED if f"`{name}`" not in page] == []


@pytest.mark.full
def test_every_other_test_of_make_gpu_is_collected_on_the_virtual_gpu(virtual_gpu: VirtualGpu) -> None:
    found = rehearsal("--collect-only", "tests/gpu")
    assert found["left_out"] == sorted(NOT_REHEARSED)
    assert found["collected"] == sorted(REHEARSED)


@pytest.mark.full
def test_a_cut_of_them_passes_with_values(virtual_gpu: VirtualGpu, tally: Tally) -> None:
    _passes(CUT, tally)


@pytest.mark.full
@pytest.mark.parametrize("test", REHEARSED)
def test_each_of_them_passes_with_values(test: str, virtual_gpu: VirtualGpu, tally: Tally) -> None:
    _passes([test], tally)


def _passes(tests: list[str], tally: Tally) -> None:
    found = rehearsal(*tests)
    counts = {"passed": len(found["passed"]), "unordered": len(found["unordered"])}
    tally("rehearsed tests of make gpu", operations=found["operations"], **counts)
    assert {one.partition("[")[0] for one in found["passed"]} == set(tests)
    assert (found["others"], found["unordered"]) == ([], [])
