"""The rows that `make gpu` compares over NCCL reach their end on the virtual GPU: nothing but their values is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from harness.attack_counts import Tally
from harness.exact import rows_of
from harness.patience import HANG_S
from harness.virtual_gpu.build import build_guard
from harness.virtual_gpu.process import ROOT, VirtualGpu


@pytest.mark.full
def test_the_rows_of_make_gpu_run_and_all_their_accesses_are_ordered(virtual_gpu: VirtualGpu, tally: Tally) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.virtual_gpu.exact_rows", str(build_guard())],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    tally("rehearsed rows", rows=found["rows"], unordered=found["disorders"])
    assert (found["rows"], found["disorders"]) == (len(rows_of(8)), 0)
