"""The memory of points before they run: the model's own arithmetic, from shapes that a child process told."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import api, arguments, cli, compose, deciding, prediction
from orchestrator.deciding import Prediction, Wishes
from orchestrator.hardware import Hardware
from orchestrator.point import Point
from orchestrator.rules import Scene
from orchestrator.run_state import RunState
from orchestrator.strict import Refusal

LAPTOP = Hardware(cores=4, cpu="cpu")
LLAMA_TINY = 1_869_504


def points(line: str) -> list[Point]:
    found, problems = cli.checked_points(compose.compose(arguments.split(line.split())), Scene(LAPTOP))
    assert problems == []
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_states_are_those_of_the_papers_formulas_and_the_second_command_needs_no_child(
    cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = points("-m zero=stage0,stage3 precision=fp32,bf16 resources.ranks=2 resources.device=cpu")
    predicted = prediction.predict(found)
    # fp32: 4 + 4 + 8 bytes; bf16 on a CPU that may compute in fp32 keeps at least 2 + 4 + 12 of its own.
    assert predicted["stage0-fp32"].states_bytes == 16 * LLAMA_TINY
    assert 8 * LLAMA_TINY <= predicted["stage3-fp32"].states_bytes <= 8 * LLAMA_TINY + 4096
    assert predicted["stage0-bf16"].states_bytes >= 18 * LLAMA_TINY
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert prediction.predict(found) == predicted


def test_states_of_8_bits_are_predicted_with_the_padding_of_their_blocks(cache: None) -> None:
    line = "zero=stage0 precision=fp32 optimizer=adamw8bit resources.ranks=2 resources.device=cpu"
    (found,) = prediction.predict(points(line)).values()
    exact, padded_units = (4 + 4 + 2 * (1 + 4 / 256)) * LLAMA_TINY, 10
    assert exact < found.states_bytes <= exact + padded_units * 2 * 256 * 10.03125


def test_a_model_that_cannot_be_built_has_no_prediction_and_the_others_have(cache: None) -> None:
    good, other = points("-m zero=stage0,stage1 resources.device=cpu")
    bad = replace(other, config=replace(other.config, model=replace(other.config.model, config={"hidden_size": -1})))
    assert set(prediction.predict([good, bad])) == {good.label}


def test_what_cannot_fit_is_left_out_with_its_arithmetic_and_runs_where_asked(tmp_path: Path) -> None:
    (point,) = points(f"zero=stage0 resources.device=cpu output={tmp_path}")
    huge = {point.label: Prediction(3 << 30, 4 << 30, ranks_share=2)}
    (planned,) = deciding.decide([point], tmp_path, lambda _: "cpu", Wishes(), huge)
    assert planned.decision is RunState.pruned
    assert planned.reason == "the model states alone, 2 x 3.00 GiB, are more than 4.00 GiB"
    (planned,) = deciding.decide([point], tmp_path, lambda _: "cpu", Wishes(prune=False), huge)
    assert planned.decision is RunState.queued
    fits = {point.label: Prediction(2 << 30, 4 << 30, ranks_share=2)}
    assert deciding.decide([point], tmp_path, lambda _: "cpu", Wishes(), fits)[0].decision is RunState.queued


def test_the_cache_is_the_users_alone(cache: None) -> None:
    assert os.stat(prediction.cache_folder()).st_mode & 0o077 == 0


def test_a_model_that_cannot_be_built_is_refused_before_a_run_starts(
    cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["+model.config.bogus=1", "resources.device=cpu", f"output={tmp_path / 'out'}"]) == 2
    told = "error: 'model.config.bogus' is not a setting of this architecture; known: "
    assert capsys.readouterr().err.startswith(told)
    assert not (tmp_path / "out").exists()


def test_one_point_of_a_sweep_is_refused_with_what_is_wrong_in_its_model(
    cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = "model.config.num_attention_heads=5,6"
    assert cli.main(["-m", heads, "resources.device=cpu", f"output={tmp_path}", "--plan", "--json"]) == 0
    shown = capsys.readouterr()
    refused, queued = json.loads(shown.out)
    assert (refused["decision"], queued["decision"]) == ("refused", "queued")
    assert refused["reason"].startswith("model.config is not a llama: ")
    assert f"refused: {refused['reason']}      (1 of 2 points)" in shown.err


def test_a_sweep_whose_every_model_is_wrong_is_an_error_with_the_nearest_word(
    cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [
        "-m",
        "zero=stage1,stage2",
        "+model.config.num_hidden_layer=2",
        "resources.device=cpu",
        f"output={tmp_path}",
    ]
    assert cli.main(line) == 2
    assert "did you mean 'num_hidden_layers'?" in capsys.readouterr().err
    monkeypatch.setattr(sys, "executable", "/bin/false")  # the answer is kept: the second command needs no child
    with pytest.raises(Refusal, match="did you mean 'num_hidden_layers'"):
        api.sweep(*line)
    assert not list(tmp_path.glob("points/*"))


def test_models_that_ship_start_no_child_before_a_run(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_ask_child", lambda _: pytest.fail("a child was started"))
    assert prediction.problems(points("-m model=llama_tiny,gpt2 zero=stage1,stage3 resources.device=cpu")) == {}
