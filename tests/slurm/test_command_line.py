"""The command line with cluster=slurm: sent and left, looked at from elsewhere, kept when typed again, cancelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sending import until, variables

ROOT = Path(__file__).resolve().parents[2]
WHERE = "cluster=slurm resources.device=cpu resources.ranks=2 resources.nodes=2 cluster.memory_gib=2"
SHORT = "tracking=none measure.warmup_steps=1 measure.steps=3 measure.validation_batches=0"


class Terminal:
    """Types commands about one output folder."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def run(self, line: str) -> tuple[int, str]:
        """The exit code and the screen."""
        words = [sys.executable, "run.py", *line.split()]
        told = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        return told.returncode, told.stdout

    def send(self, line: str) -> tuple[int, str]:
        return self.run(f"{line} {WHERE} {SHORT} output={self.output}")

    def ask(self, line: str) -> tuple[int, str]:
        return self.run(f"{line} --output {self.output}")

    def states(self) -> dict[str, str]:
        _, told = self.ask("status --json")
        return {one["label"]: one["state"] for one in json.loads(told)["points"]}


@pytest.fixture
def terminal(cluster: Path, tmp_path: Path) -> Terminal:
    return Terminal(tmp_path / "out")


def jobs_ever() -> int:
    words = ["squeue", "--array", "--states=all", "--noheader"]
    return len(subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines())


def test_a_sweep_is_sent_watched_compared_and_kept(terminal: Terminal) -> None:
    before = jobs_ever()
    code, told = terminal.send("-m zero=stage0,stage3")
    assert code == 0
    assert "sent 2 points as" in told
    assert jobs_ever() == before + 2
    assert set(terminal.states().values()) <= {"queued", "starting", "running"}
    code, told = terminal.send("-m zero=stage0,stage3")
    assert code == 0
    assert "this sweep is with the cluster already" in told
    assert terminal.ask("status")[0] == 3
    code, told = terminal.ask("watch")
    assert code == 0
    assert "sorted by median tokens/s" in told
    assert terminal.states() == {"stage0": "ok", "stage3": "ok"}
    code, told = terminal.ask("logs last stage3 --rank 1")
    assert "on node2" in told
    code, told = terminal.send("-m zero=stage0,stage3")
    assert code == 0
    assert "measured before" in told
    assert jobs_ever() == before + 2


def test_a_point_that_is_cancelled_is_taken_up_again_by_the_same_command(terminal: Terminal) -> None:
    with variables(ZLAB_FAULT="slow@step1:rank0"):
        terminal.send("zero=stage2")
    until(lambda: set(terminal.states().values()) == {"running"}, "it runs", 120)
    code, told = terminal.ask("cancel")
    assert code == 0
    assert "cancelled 1 points" in told
    assert set(terminal.states().values()) == {"cancelled"}
    code, told = terminal.ask("resume")
    assert code == 0
    assert "sent 1 points" in told
    code, told = terminal.ask("watch")
    assert code == 0
    assert set(terminal.states().values()) == {"ok"}


def test_what_the_cluster_cannot_give_is_refused_and_leaves_no_trace(terminal: Terminal) -> None:
    before = jobs_ever()
    code, told = terminal.send("zero=stage2 cluster.partition=mian")
    assert code == 2
    assert "fix: cluster.partition=main" in told
    assert jobs_ever() == before
    assert not (terminal.output / "sweeps").exists()
