"""The script that runs DeepSpeed's own tests tells a pass from a refusal, a missing name and a wrong number."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tests" / "deepspeed_suite" / "run.py"
# A checkout of our own with what the script asks of DeepSpeed's: a class that starts ranks, a util, and tests.
_COMMON = """
import os
import deepspeed
class DistributedExec:
    is_dist_test = True
    world_size = 2
    def __call__(self, request):
        self.test = getattr(self, request.function.__name__)
        self.values = {name: request.getfixturevalue(name) for name in ("value",) if name in request.fixturenames}
        self._launch_procs(self.world_size, "file://" + str(request.getfixturevalue("tmpdir").join("store")))
    def _dist_run(self, rank, ranks, port, init_method):
        deepspeed.init_distributed(init_method=init_method, rank=rank, world_size=ranks)
        self.test(**self.values)
"""
_TESTS = """
import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.constants import LIMIT, Places
from deepspeed.runtime.engine import no_such_name
from unit.common import DistributedExec

class TestAll(DistributedExec):
    def test_sums(self):
        value = torch.ones(())
        dist.all_reduce(value)
        assert (value.item(), LIMIT, Places.cpu.value) == (2.0, 3, "cpu")
    @pytest.mark.parametrize("value", range(10))
    def test_sampled(self, value):
        assert value in (0, 4, 9)
    def test_refused(self):
        zero = {"ignore_unused_parameters": False}
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"zero_optimization": zero, "train_batch_size": 2})
    def test_missing(self):
        no_such_name()
    def test_wrong(self):
        assert dist.get_rank() == 0
class TestMany(DistributedExec):
    world_size = 4
    def test_skipped(self):
        pass
"""
_CONSTANTS = "from enum import Enum\nimport nowhere\nLIMIT = 3\nclass Places(str, Enum):\n    cpu = 'cpu'\n"


@pytest.mark.full
def test_the_suites_script_tells_what_each_outcome_means(tmp_path: Path) -> None:
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    unit, package = checkout / "tests" / "unit", checkout / "deepspeed" / "runtime"
    (unit / "runtime").mkdir(parents=True)
    package.mkdir(parents=True)
    for folder in (unit, unit / "runtime", package, package.parent):
        (folder / "__init__.py").write_text("")
    (unit / "common.py").write_text(_COMMON)
    (unit / "util.py").write_text("")
    (unit / "runtime" / "test_data.py").write_text(_TESTS)
    (package / "constants.py").write_text(_CONSTANTS)
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    command = [sys.executable, RUN, checkout, "--out", out, "--files", "runtime/test_data", "--sampled", "3"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = json.loads((out / "summary.json").read_text())
    kinds = {name.rpartition("::")[2]: one["kind"] for name, one in found["tests"].items()}
    assert kinds == {
        "test_sums": "passed",
        **{f"test_sampled[{value}]": "passed" for value in (0, 4, 9)},
        "test_refused": "rightly",
        "test_missing": "name",
        "test_wrong": "wrong",
        "test_skipped": "skipped",
    }, ran.stdout
    assert "test_wrong\nAssertionError" in ran.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "8 deselected" in again.stdout or "no tests ran" in again.stdout
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before


def test_each_reason_is_a_class_a_pattern_and_a_sentence() -> None:
    sys.path.insert(0, str(RUN.parent))
    try:
        from reasons import REASONS, Kind
    finally:
        sys.path.remove(str(RUN.parent))
    for kind, pattern, why in REASONS:
        assert isinstance(kind, Kind)
        re.compile(pattern)
        assert why or kind is Kind.name, pattern
