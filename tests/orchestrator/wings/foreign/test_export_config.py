"""`zlab export` writes a measured point for each stack, and `import` makes of its files the point that was measured."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ended_output import ended_sweep

from orchestrator import cli
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.schema import Model, RunConfig
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import here
from orchestrator.wings.foreign.point_words import words_of_point

LINE = (
    "-m zero=stage1,stage2 precision=bf16 batch.accumulation=2 optimizer.clip_norm=0.5 scheduler=constant "
    "model=llama_tiny measure.steps=9 resources.device=cpu resources.ranks=2 tracking=none seed=7"
)
LABEL = "stage2"
FILES = {
    "deepspeed": {"ds_config.json", "loop_parts.py"},
    "fsdp2": {"fsdp2_parts.py"},
}


def configs(*words: str) -> dict[str, RunConfig]:
    """The points of a command line by label."""
    found, problems = checked_points(composed(arguments.split([*words])), here())
    assert problems == []
    return {point.label: point.config for point in found}


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder with a sweep of two points, one of which is LABEL."""
    monkeypatch.chdir(tmp_path)
    points, _ = checked_points(composed(arguments.split([*LINE.split(), "output=out"])), here())
    ended_sweep(tmp_path / "out", "zero", points)
    return tmp_path / "out"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The document that a command prints with --json."""
    assert cli.main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def exported(output: Path, stack: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """The files of LABEL by name."""
    document = told(capsys, "export", LABEL, "--to", stack, "--output", str(output))
    files = {name: Path(path) for name, path in document["files"].items()}
    assert (document["point"], document["to"], set(files)) == (LABEL, stack, FILES[stack])
    assert {path.parent for path in files.values()} == {output / "exported" / f"{LABEL}-{stack}"}
    return files


def imported(capsys: pytest.CaptureFixture[str], *words: str) -> RunConfig:
    """The point of the experiment file that `import` writes, composed as its `next` line is."""
    document = told(capsys, "import", *words)
    assert document["problems_here"] == []
    (config,) = configs("--config-dir", document["config_dir"], f"experiment={document['experiment']}").values()
    return config


def test_the_json_file_for_deepspeed_comes_back_as_the_measured_point(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = exported(output, "deepspeed", capsys)
    content = json.loads(files["ds_config.json"].read_text())
    assert (content["train_batch_size"], content["gradient_accumulation_steps"]) == (16, 2)
    assert (content["zero_optimization"]["stage"], content["gradient_clipping"]) == (2, 0.5)
    assert words_of_point(imported(capsys, str(files["ds_config.json"]))) == words_of_point(
        configs(*LINE.split())[LABEL]
    )


def test_the_file_for_fsdp2_needs_torch_alone(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = ast.parse(exported(output, "fsdp2", capsys)["fsdp2_parts.py"].read_text())
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} == {"re", "torch"}
    assert {"shard", "optimizer", "schedule", "train_step"} < {
        one.name for one in nodes if isinstance(one, ast.FunctionDef)
    }


def test_a_runs_folder_and_settings_name_the_same_point(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = exported(output, "deepspeed", capsys)["ds_config.json"].read_text()
    (config,) = (path for path in output.glob("points/*/attempts/01/config.json") if '"stage": 2' in path.read_text())
    typed = [word.replace("stage1,stage2", LABEL) for word in LINE.split()[1:]]
    for out, words in enumerate(([str(config.parent)], [str(config.parents[2])], typed)):
        files = told(capsys, "export", *words, "--to", "deepspeed", "--out", str(out))["files"]
        assert Path(files["ds_config.json"]).read_text() == first


def test_a_run_of_epochs_has_the_steps_that_it_trained_and_settings_change_a_point(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = LINE.replace("stage1,stage2", "stage2").replace("-m ", "").replace("measure.steps=9", "measure=train")
    words = f"{line} scheduler=warmup_decay train.epochs=2 output={output}".replace("scheduler=constant ", "").split()
    points, _ = checked_points(composed(arguments.split(words)), here())
    ended_sweep(output, "trained", points)
    (config,) = (path for path in output.glob("points/*/attempts/01/config.json") if '"epochs": 2' in path.read_text())
    folder, samples = str(config.parents[2]), json.loads((config.parent / "result.json").read_text())["data"]

    def content(*words: str) -> Any:
        found = told(capsys, "export", *words, "--to", "deepspeed", "--output", str(output), "--out", words[-1])
        return json.loads(Path(found["files"]["ds_config.json"]).read_text())

    steps = math.ceil(2 * samples["train_samples"] / 16)
    assert content(folder)["scheduler"]["params"]["total_num_steps"] == steps
    assert content(folder, "train.max_steps=7")["scheduler"]["params"]["total_num_steps"] == 7
    assert content(LABEL, "zero=stage1", "--sweep", "zero")["zero_optimization"]["stage"] == 1


def test_the_words_of_a_model_in_a_folder_leave_its_architecture_to_the_folder() -> None:
    (config,) = configs("zero=stage2").values()
    words = words_of_point(replace(config, model=Model("mine", "llama", {"hidden_size": 64}, path="/a/mine")))
    assert {key: word for key, word in words.items() if key.startswith("model")} == {
        "model": "pretrained",
        "model.path": "/a/mine",
    }


def test_an_evaluation_is_not_exported(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "zero=stage3", "measure=eval", "--to", "deepspeed"]) == 2
    assert "measure=eval trains nothing that another stack could run" in capsys.readouterr().err
    assert cli.main(["export", "measure=train", "train.epochs=2", "--to", "deepspeed"]) == 2
    assert "the number of steps of train.epochs depends on the data" in capsys.readouterr().err
