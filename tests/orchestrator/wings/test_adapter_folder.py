"""Folders of LoRA adapters: what is added to the weights of their base, by range, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from harness.in_memory import InMemory
from safetensors.torch import save_file

from orchestrator.config import pretrained
from orchestrator.config.schema import Model
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


PLAIN_LORA = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"base_model_name_or_path": "Qwen/Qwen2.5-7B"},
            "or in the hub's cache (hf download Qwen/Qwen2.5-7B), found the name",
        ),
        ({"base_model_name_or_path": "/no/such/base"}, "or in the hub's cache, found /no/such/base"),
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


TOKENS: dict[str, Any] = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}


@pytest.mark.parametrize(
    ("tokenizer", "others", "told"),
    [
        (TOKENS, True, None),
        (TOKENS, False, None),  # transformers cannot read it alone, so that of the base is used
        ({"model": {"vocab": [["a", -1.0]] * 3}, "added_tokens": []}, True, None),
        (TOKENS | {"added_tokens": [{"id": 3}]}, True, "vocab_size is 3; take it away to use .*, found a token 3"),
        ({"model": {}}, True, "found none that can be read"),
    ],
)
def test_a_tokenizer_saved_with_adapters_is_used_if_it_has_no_token_beyond_the_base(
    tokenizer: dict[str, Any], others: bool, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    base = cache / "models--a--b" / "snapshots" / "0123"  # as the hub's library lays its cache out
    base.mkdir(parents=True)
    (base.parents[1] / "refs").mkdir()
    (base.parents[1] / "refs" / "main").write_text("0123")
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 3}))
    save_file({"a": torch.zeros(1)}, base / "model.safetensors")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN_LORA, "base_model_name_or_path": "a/b"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if others:
        (folder / "tokenizer_config.json").write_text("{}")
    model = pretrained.completed(Model("pretrained", path=str(folder)))
    assert (model.path, model.adapter) == (str(base), str(folder))
    found = pretrained.problem(model)
    assert found is None if told is None else re.search(told, str(found))
    assert pretrained.tokenizer_folder(model.path, model.adapter) == (folder if others else base)
