"""Sweeps run on a real SLURM from the command line: submitted, watched, compared, cancelled and resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sending import until, variables

ROOT = Path(__file__).resolve().parents[2]
LINE = (
    "cluster=slurm cluster.memory_gib=2 resources.device=cpu resources.ranks=2 resources.nodes=2 resources.threads=1 "
    "resources.time_limit_min=5 model=llama_tiny data=synthetic precision=fp32 batch.seq=16 batch.micro=1 "
    "measure.validation_batches=0 measure.warmup_steps=1 measure.steps=3 tracking=none"
)


class Terminal:
    """Runs commands in a separate folder, which also receives their outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def type(self, line: str) -> tuple[int, str]:
        """Runs a command and returns its exit code and its output."""
        words = [sys.executable, str(ROOT / "run.py"), *line.split()]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        told = subprocess.run(words, cwd=self.folder, text=True, timeout=120, **streams)  # type: ignore[call-overload]
        return told.returncode, told.stdout

    def states(self) -> dict[str, str]:
        _, told = self.type("status --json")
        return {one["label"]: one["state"] for one in json.loads(told)["points"]}

    def attempts(self) -> int:
        return len(list(self.folder.glob("outputs/points/*/attempts/*")))


@pytest.fixture
def terminal(cluster: Path, tmp_path: Path) -> Terminal:
    return Terminal(tmp_path)


def test_a_sweep_is_submitted_and_compared_and_the_same_command_again_submits_nothing(terminal: Terminal) -> None:
    command = f"-m zero=stage1,stage3 {LINE}"
    code, told = terminal.type(command)
    assert code == 0, told
    assert re.search(r"sent 2 points as 1 job array \(\d+\); this terminal", told), told
    assert "this terminal may be closed" in told
    assert set(terminal.states().values()) <= {"queued", "starting", "running"}
    assert "this sweep is with the cluster already" in terminal.type(command)[1]
    assert terminal.type("status")[0] == 3
    code, told = terminal.type("watch")
    assert code == 0, told
    assert "sorted by median tokens/s" in told
    assert terminal.states() == {"stage1": "ok", "stage3": "ok"}
    assert "rank 1 of 2" in terminal.type("logs last stage3 --rank 1")[1]
    code, told = terminal.type(command)
    assert code == 0, told
    assert "measured on" in told
    assert terminal.attempts() == 2
    assert list(terminal.folder.glob("outputs/sweeps/*/report.md"))
    added = [json.loads(terminal.type("sync last --json")[1])[0]["added"] for _ in range(2)]
    assert added == [3, 0], "both points and the summary, once"


def test_a_running_sweep_can_be_cancelled_and_resumed(terminal: Terminal) -> None:
    with variables(ZLAB_FAULT="slow@step1:rank0"):
        terminal.type(f"-m zero=stage0,stage2 {LINE} measure.steps=60")
    until(lambda: "running" in terminal.states().values(), "one runs", 120)
    code, told = terminal.type("cancel")
    assert code == 0, told
    assert "cancelled 2 points" in told
    assert set(terminal.states().values()) == {"cancelled"}
    code, told = terminal.type("resume")
    assert code == 0, told
    assert "sent 2 points" in told
    code, told = terminal.type("watch")
    assert code == 0, told
    assert set(terminal.states().values()) == {"ok"}


def test_an_unknown_partition_is_refused_before_anything_is_submitted(terminal: Terminal) -> None:
    code, told = terminal.type(f"zero=stage2 {LINE} cluster.partition=mian")
    assert code == 2
    assert "fix: cluster.partition=main" in told
    assert terminal.attempts() == 0
    assert not (terminal.folder / "outputs" / "sweeps").exists()


def test_the_python_api_waits_for_the_points_that_it_submitted(terminal: Terminal) -> None:
    code = f"import orchestrator; print(orchestrator.run(*{['zero=stage1', *LINE.split()]!r}).state.value)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code]
    told = subprocess.run(words, cwd=terminal.folder, env=environment, capture_output=True, text=True, timeout=120)
    assert told.stdout.split() == ["ok"], told.stderr
