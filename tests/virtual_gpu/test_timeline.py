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
from harness.virtual_gpu.process import Job, VirtualGpu
from harness.virtual_gpu.row import Row

from benchmarks.gpu_timeline import CEILINGS

ROOT = Path(__file__).resolve().parents[2]


def timed(virtual_gpu: VirtualGpu, **settings: Any) -> dict[str, Any]:
    """A row whose kernels take longer than its gathers: 4,096 tokens, blocks of 21 million parameters."""
    return virtual_gpu.result(Job(Row(width=2048, blocks=6, tokens=4096, vocab=2048, **settings), timed=True))


def test_gathers_hide_behind_computation_if_they_are_prefetched(virtual_gpu: VirtualGpu) -> None:
    ahead, late = (timed(virtual_gpu, prefetch=prefetch)["exposed_all_gather_ms"] for prefetch in (1, 0))
    assert 0 < 2 * ahead < late


def test_of_the_replicas_all_reduces_only_the_last_are_exposed(virtual_gpu: VirtualGpu) -> None:
    found = timed(virtual_gpu, world=32, shard_ranks=8)
    assert 0 < found["exposed_all_reduce_ms"] < found["all_all_reduce_ms"] / 3


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
