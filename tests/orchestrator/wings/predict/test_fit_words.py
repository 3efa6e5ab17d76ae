"""The words of `fit`: machines, models and groups as the points that they make, and the columns of a narrow table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.strict import Refusal
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import here
from orchestrator.report.narrow import Narrowed, narrowed
from orchestrator.report.summary import Table
from orchestrator.wings.predict import fit as command
from orchestrator.wings.predict import fit_page, fit_words
from orchestrator.wings.predict.fit_page import DROPPED


def test_a_config_json_suffices_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "vocab_size": 256}')
    for words in (f"model={tmp_path}", f"model={tmp_path}/config.json"):
        overrides = fit_words.with_folder(words)
        assert overrides == ["model=pretrained", f"model.path={tmp_path}"]
    points = command._points([*overrides, "hardware=a10"], None)
    assert points[0].config.model.model_type == "llama"
    # The plan that fit proposes takes it; a plan for this machine, and a run, need weights.
    for words, needs in ((["hardware=a10", "--plan"], False), (["--plan"], True), (["resources.ranks=1"], True)):
        scene = replace(here(), plan_only="--plan" in words)
        _, problems = judged(composed(arguments.split([*overrides, *words])), scene)
        assert any("must hold model.safetensors" in problem for problem in problems) is needs
    assert fit_page._can_be_planned(points[0].config)
    assert fit_words.with_folder("model=llama2_7b") == ["model=llama2_7b"]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match="model_type"):
        command._points([*overrides, "hardware=a10"], None)


@pytest.mark.full  # imports transformers: 4 s; bytes are counted in test_fit.py
def test_epochs_count_the_tokens_that_the_model_s_tokenizer_makes(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, "two": 1, "words": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "vocab_size": 256}')
    (tmp_path / "data.txt").write_text("two words\n" * 100)
    of_data = f"data=text data.path={tmp_path}/data.txt data.validation_fraction=0 measure.validation_batches=0"
    config = command._points(
        f"model=pretrained model.path={tmp_path} {of_data} batch.seq=16 hardware=a10".split(), None
    )[0].config
    samples = 200 // 17  # each has a token more than its sequence: the label of the last
    assert fit_words.Length(epochs=2).tokens_of(config) == 2 * samples * 16
    (tmp_path / "data.txt").write_text("two words")
    with pytest.raises(Refusal, match=r"found 2.* fix: train\.tokens=50e6"):
        fit_words.Length(epochs=2).tokens_of(config)


def test_a_group_that_is_given_is_kept_and_lists_are_compared() -> None:
    points = command._points(["zero=stage2,stage3", "offload=none", "hardware=a10", "loss=full"], None)
    assert [point.label for point in points] == [
        f"stage{stage}{ending}" for stage in (2, 3) for ending in ("", "-by_operation", "-full")
    ]
    (one,) = command._points(["zero=stage2", "offload=none", "hardware=a10", "loss=full", "recompute=full"], None)
    assert one.label == "stage2"


def test_other_lists_are_part_of_the_label() -> None:
    fixed = ["zero=stage2", "offload=none", "hardware=a10", "loss=full", "recompute=none,full"]
    points = command._points([*fixed, "precision=fp32,bf16", "batch.seq=64,128"], None)
    assert [point.label for point in points][:3] == ["stage2-fp32-seq64", "stage2-fp32-seq128", "stage2-bf16-seq64"]


def test_ranks_on_a_cpu_have_no_offload_to_host_memory() -> None:
    points = command._points(["model=llama_tiny", "resources.device=cpu", "loss=full", "recompute=none"], None)
    assert [point.label for point in points] == ["stage0", "stage1", "stage2", "stage3"]


def test_a_narrow_terminal_loses_columns_before_it_cuts_names() -> None:
    table = Table(
        ("row", "micro", "tokens/step", "activations", "largest part"),
        (("stage1", "2", "8,192", "48.7", "blocks"),),
        drops=DROPPED,
    )
    assert narrowed(table, 10_000) == narrowed(table, 80) == Narrowed(table)
    assert narrowed(table, 42).table.header == ("row", "micro", "activations", "largest part")
    assert narrowed(table, 20).fits
    assert not narrowed(table, 1).fits
    assert narrowed(table, 20).left_out == ("tokens/step", "activations", "largest part")


@pytest.mark.parametrize(("packing", "told"), [("false", "tokens, padding included, are"), ("true", "tokens are")])
def test_a_job_says_whether_its_tokens_include_padding(
    packing: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_words, "tokens_of_an_epoch", lambda config: 4096)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 9)
    config = command._points(
        f"model=llama_tiny hardware=a10 data=pairs data.packing={packing} data.path={tmp_path}/data.jsonl".split(), None
    )[0]
    assert told in fit_words.length_text(fit_words.Length(epochs=1), config.config, None)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("zero=stage3", ["adapter=lora", "precision.weights=int4"]),
        ("parallel.tp=2", ["adapter=lora"]),  # codes are refused beside slices, and beside offloaded parameters
        ("offload=param_cpu", ["adapter=lora"]),
        ("adapter=lora", []),
    ],
)
def test_adapters_are_proposed_with_what_they_go_with(words: str, more: list[str]) -> None:
    assert fit_words.with_less(words.split()) == more
