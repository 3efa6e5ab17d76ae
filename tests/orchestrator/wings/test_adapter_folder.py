"""Folders of LoRA adapters: what is added to the weights of their base, by range, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.in_memory import InMemory

from orchestrator.config import pretrained
from orchestrator.config.schema import Data, Model, Tokenizer
from orchestrator.plan.rules.data import tokenizer_of
from zero_runtime.checkpoint.hugging_face.lora import MergedLora


def test_a_part_of_a_merged_matrix_is_that_part_of_the_whole() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(7, 5, bias=False)})
    base = {"a.weight": torch.randn(5, 7)}
    pair = {
        "base_model.model.a.lora_A.weight": torch.randn(3, 7),
        "base_model.model.a.lora_B.weight": torch.randn(5, 3),
    }
    merged = MergedLora(InMemory(base), InMemory(pair), model, 2.0)
    a, b = (value.double() for value in pair.values())
    exact = (base["a.weight"].double() + 2.0 * b @ a).reshape(-1)
    # Three products, two sums, the scale (exact) and the sum with W: at most five roundings of values below these.
    bound = 5 * torch.finfo(torch.float32).eps * (base["a.weight"].double().abs() + 2.0 * b.abs() @ a.abs()).reshape(-1)
    for start, stop in ((0, 35), (3, 20), (8, 9), (34, 35)):
        found = merged.read("a.weight", start, stop).double()
        assert ((found - exact[start:stop]).abs() <= bound[start:stop]).all()


def test_the_tokenizer_is_that_of_the_adapters_if_they_brought_one(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    model = Model("pretrained", path=str(base), adapter=str(adapter))
    assert pretrained.tokenizer_folder(model) == base
    (base / pretrained.TOKENIZER).touch()
    assert tokenizer_of(model, Data()) is Tokenizer.model
    assert pretrained.tokenizer_folder(model) == base
    (adapter / pretrained.TOKENIZER).touch()
    assert pretrained.tokenizer_folder(model) == adapter
    assert pretrained.tokenizer_folder(Model("tiny", "llama")) is None


PLAIN_LORA = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"base_model_name_or_path": "Qwen/Qwen2.5-7B"}, "hf download Qwen/Qwen2.5-7B --local-dir FOLDER_OF_THE_BASE"),
        ({"base_model_name_or_path": "/no/such/base"}, "must be a folder on this disk, found /no/such/base"),
        ({}, "no base_model_name_or_path in adapter_config.json"),
        ({"use_dora": True}, "use_dora=True"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"r": None}, "must hold the settings of LoRA"),
    ],
)
def test_adapters_that_cannot_be_added_are_refused_with_a_way_out(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PLAIN_LORA, **settings}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    model = Model("pretrained", path=str(tmp_path))
    assert told in str(pretrained.problem(pretrained.completed(model)))
    assert "model.path=" in str(pretrained.problem(Model("pretrained", adapter=str(tmp_path))))
    missing = Model("pretrained", path=str(tmp_path), adapter=str(tmp_path / "none"))
    assert "must be a folder with adapter_config.json" in str(pretrained.problem(missing))
