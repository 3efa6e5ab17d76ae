"""The commands of docs/gpu.md are valid on the machine that it describes, and name claims that exist."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks.gpu_claims import CLAIMS
from orchestrator.compose import arguments, compose
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
LINES = [line for line in PAGE.splitlines() if line.startswith("python run.py")]
EIGHT = Scene(Hardware(cores=96, cpu="cpu", gpus=8, gpu="H100"))


@pytest.mark.parametrize("line", LINES)
def test_a_line_with_expected_figures_is_a_point_on_eight_gpus(line: str) -> None:
    words = shlex.split(line)[2:]
    (point,), problems = checked_points(compose.compose(arguments.split(words)), EIGHT)
    assert problems == []
    config = point.config
    assert (config.resources.ranks, config.resources.device, config.batch.seq) == (8, "cuda", 4096)


def test_the_page_has_lines_and_its_claims_exist() -> None:
    assert len(LINES) >= 3
    (only,) = [line for line in PAGE.splitlines() if "--only" in line]
    named = only.split("--only ")[1].split()[0].split(",")
    assert set(named) <= {claim.name for claim in CLAIMS}
    assert all(f"`{name}`" in PAGE for name in ("one-rank", "nccl", "hybrid", "overhead"))
