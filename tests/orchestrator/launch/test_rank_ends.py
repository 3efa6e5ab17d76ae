"""In a real run, a failing rank is detected by the runtime's watch and reported by the command with step and place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import HANG_S

ROOT = Path(__file__).resolve().parents[3]
LINE = (
    "model=llama_tiny data=synthetic zero=stage3 precision=fp32 tracking=none resources.device=cpu resources.ranks=2 "
    "resources.threads=1 batch.seq=16 batch.micro=1 measure.validation_batches=0 resources.stuck_s=8"
)


@pytest.mark.parametrize(
    ("fault", "state", "told"),
    [
        pytest.param("hang@step1:rank1", "hang", "rank 1 has not come to it for", marks=pytest.mark.full),
        pytest.param("hang@step3:rank1", "hang", "rank 1 has not come to it for", marks=pytest.mark.full),
        pytest.param("sigkill@step3:rank1", "error", "rank 1 was killed by SIGKILL", marks=pytest.mark.full),
        pytest.param("oom@step3:rank1", "oom", "rank 1: out of memory in forward of step 3", marks=pytest.mark.full),
    ],
)
def test_the_command_names_the_failed_rank_its_step_and_its_phase(
    fault: str, state: str, told: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *LINE.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "ZLAB_FAULT": fault},
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == (4 if state == "oom" else 1)
    (attempt,) = tmp_path.glob("outputs/points/*/attempts/*")
    record = json.loads((attempt / "state.json").read_text())
    assert (record["state"], record["rank"]) == (state, 1)
    assert told in record["message"]
    step = fault.partition("@step")[2][0]
    assert f"step {step}, forward" in record["message"] or f"forward of step {step}" in record["message"]
    other = json.loads((attempt / "rank0.json").read_text())
    assert (other["state"], other["blamed"]) == ("error", [1])
    if state == "oom":
        memory = json.loads((attempt / "rank1.json").read_text())["memory"]
        assert (memory["phase"], memory["step"], memory["wanted"]) == ("forward", 3, "1152921504606846976 bytes")
        assert memory["held"]["optimizer"] > 0
        assert "held params" in record["message"]
        assert "no single setting frees 1152921504606846976 bytes" in record["message"]
    if state == "hang":
        assert any("at_step" in line for line in record["log"])  # the stack of the rank that hangs
