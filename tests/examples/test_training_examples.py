"""The training examples run on two ranks: losses fall, do not depend on the stage, and a run resumes in the middle."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.ranks import run_ranks
from harness.trainer_runs import as_launched

FOLDER = Path(__file__).resolve().parents[2] / "examples"
FIRST_LOSS = (5.4, 5.7)  # around ln 256, that of a guess between all bytes


def printed(name: str, *words: str) -> str:
    """What the script prints on this rank of an initialized world, started as `zlab launch` starts it."""
    as_launched()
    script = FOLDER / f"{name}.py"
    out = io.StringIO()
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(FOLDER))  # as for a script that python runs
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def on_ranks(name: str, *words: str) -> str:
    """What rank 0 prints."""
    return str(run_ranks(printed, 2, name, *words)[0])


def test_the_plain_loop_trains_alike_in_stages_2_and_3(tmp_path: Path) -> None:
    out = on_ranks("plain_loop", "--steps", "4")
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", out)]
    assert [int(text) for text in re.findall(r"^step (\d+)", out, re.MULTILINE)] == [1, 2, 3, 4]
    assert FIRST_LOSS[0] < losses[0] < FIRST_LOSS[1]
    assert losses[-1] < losses[0]
    (tmp_path / "stage3.json").write_text(
        json.dumps(constant("plain_loop", "CONFIG") | {"zero_optimization": {"stage": 3}})
    )
    assert on_ranks("plain_loop", "--steps", "4", "--deepspeed_config", str(tmp_path / "stage3.json")) == out


@pytest.mark.full
def test_the_trainer_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--max_steps", "4", "--save_steps", "2", "--eval_steps", "2"]
    out = on_ranks("trainer", *words)
    assert "trained 4 steps on 2 ranks" in out
    logs = logged(out)
    losses = [float(one["loss"]) for one in logs if "loss" in one]
    assert len(losses) == 4
    assert FIRST_LOSS[0] < losses[0] < FIRST_LOSS[1]
    assert losses[-1] < losses[0]
    evaluations = [float(one["eval_loss"]) for one in logs if "eval_loss" in one]
    assert len(evaluations) == 3, "at steps 2 and 4, and at the end"
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "checkpoint-4").is_dir()
    again = on_ranks("trainer", *words, "--resume_from_checkpoint", str(tmp_path / "checkpoint-2"))
    assert [float(one["loss"]) for one in logged(again) if "loss" in one] == losses[2:]
    assert out.splitlines()[-1] == again.splitlines()[-1], "the loss of the last evaluation"


def constant(name: str, of: str) -> Any:
    """The value of a constant of a script, which is not run."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return ast.literal_eval(values[of])


def logged(out: str) -> list[dict[str, str]]:
    """What the Trainer prints of its logs: a dictionary for each."""
    return [ast.literal_eval(line) for line in out.splitlines() if line.startswith("{")]
