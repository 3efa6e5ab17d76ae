"""Communication hides behind computation: what is exposed, with the stated costs of a GPU, stays below its ceilings."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness.attack_counts import Tally

from benchmarks.gpu_timeline import CEILINGS

ROOT = Path(__file__).resolve().parents[2]


@cache
def rows(choice: str) -> dict[str, Any]:
    """The rows of the benchmark, by name. Its process loads the virtual GPU's library before torch."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_timeline.py"), "--json", choice]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["name"]: row for row in json.loads(done.stdout)}


@pytest.mark.full
@pytest.mark.parametrize("row", CEILINGS, ids=str)
def test_exposed_communication_stays_below_its_ceiling(row: Any, checked: Tally) -> None:
    found = rows("--ceilings")[str(row)]
    checked("rows with a timeline", rows=1, launches=found["launches"])
    assert 0 < 100 * found["exposed_ms"] / found["time_ms"] < CEILINGS[row]


@pytest.mark.full
def test_prefetching_hides_gathers_and_no_schedule_exposes_more_than_fsdp2() -> None:
    found = rows("--cut")
    name = "7B, 8 GPUs, stage 3"
    assert 2 * found[f"{name}, ours"]["exposed_ms"] < found[f"{name}, no prefetch, ours"]["exposed_ms"]
    for kind in (name, "7B, 4 nodes x 8, stage 3", "7B, 4 nodes x 8, hybrid 8"):
        assert found[f"{kind}, ours"]["exposed_ms"] <= found[f"{kind}, FSDP2"]["exposed_ms"], kind
