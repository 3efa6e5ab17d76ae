"""A sweep from the command line to a real SLURM and back: sent, left, read from elsewhere, cancelled, gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sending import until

ROOT = Path(__file__).resolve().parents[2]
LINE = (
    "cluster=slurm cluster.memory_gib=2 resources.device=cpu resources.ranks=2 resources.nodes=2 resources.threads=1 "
    "resources.time_limit_min=5 model=llama_tiny data=synthetic precision=fp32 batch.seq=16 batch.micro=1 "
    "measure.validation_batches=0 measure.warmup_steps=1 measure.steps=3 tracking=none"
)


def typed(folder: Path, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "run.py"), *line.split()]
    return subprocess.run(
        words, capture_output=True, text=True, cwd=folder, env={**os.environ, **environ}, timeout=120, check=False
    )


def states(folder: Path) -> dict[str, str]:
    told = json.loads(typed(folder, "status --json").stdout)
    return {one["label"]: one["state"] for one in told["points"]}


@pytest.mark.usefixtures("cluster")
def test_a_sweep_is_sent_left_and_read_and_the_same_command_again_sends_nothing(tmp_path: Path) -> None:
    command = f"-m zero=stage1,stage3 {LINE}"
    sent = typed(tmp_path, command)
    assert sent.returncode == 0, sent.stderr
    assert "this terminal may be closed" in sent.stdout
    again = typed(tmp_path, command)
    assert "this sweep is with the cluster already" in again.stdout
    until(lambda: set(states(tmp_path).values()) == {"ok"}, "both points measured", 120)
    assert "rank 0 of 2" in typed(tmp_path, "logs last stage3").stdout
    done = typed(tmp_path, command)
    assert (done.returncode, "cached" in done.stdout) == (0, True)
    assert len(list(tmp_path.glob("outputs/points/*/attempts/*"))) == 2
    assert list(tmp_path.glob("outputs/sweeps/*/report.md"))


@pytest.mark.usefixtures("cluster")
def test_a_sweep_is_cancelled_and_gone_on_with_by_name(tmp_path: Path) -> None:
    typed(tmp_path, f"-m zero=stage0,stage2 {LINE}")
    cancelled = typed(tmp_path, "cancel")
    assert cancelled.returncode == 0, cancelled.stderr
    assert set(states(tmp_path).values()) == {"cancelled"}
    resumed = typed(tmp_path, "resume")
    assert resumed.returncode == 0, resumed.stderr
    until(lambda: set(states(tmp_path).values()) == {"ok"}, "both points measured", 120)


@pytest.mark.usefixtures("cluster")
def test_what_the_cluster_cannot_run_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    refused = typed(tmp_path, f"zero=stage1 {LINE} cluster.partition=nowhere")
    assert refused.returncode == 2
    assert "this cluster has" in refused.stdout
    assert not list(tmp_path.glob("outputs/points/*"))
