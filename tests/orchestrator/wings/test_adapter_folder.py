"""Folders of LoRA adapters: what is added to the weights of their base, by range, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import huggingface_hub.constants
import pytest
import torch
from harness.in_memory import InMemory
from harness.ranks import run_alone
from safetensors.torch import save_file

from orchestrator import cli
from orchestrator.config import pretrained
from orchestrator.config.schema import Model
from orchestrator.wings.pretrained import adapter_folder
from zero_runtime.checkpoint.hugging_face.lora import MergedLora
from zero_runtime.errors import CheckpointError


def test_a_part_of_a_merged_matrix_is_that_part_of_the_whole() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(7, 5, bias=False)})
    base = {"a.weight": torch.randn(5, 7)}
    pair = {
        "base_model.model.a.lora_A.weight": torch.randn(3, 7),
        "base_model.model.a.lora_B.weight": torch.randn(5, 3),
    }
    merged = MergedLora(InMemory(base), InMemory(pair), model, {"r": 3, "lora_alpha": 6.0})
    a, b = (value.double() for value in pair.values())
    exact = (base["a.weight"].double() + 2.0 * b @ a).reshape(-1)
    # Three products, two sums, the scale (exact) and the sum with W: at most five roundings of values below these.
    bound = 5 * torch.finfo(torch.float32).eps * (base["a.weight"].double().abs() + 2.0 * b.abs() @ a.abs()).reshape(-1)
    for start, stop in ((0, 35), (3, 20), (8, 9), (34, 35)):
        found = merged.read("a.weight", start, stop).double()
        assert ((found - exact[start:stop]).abs() <= bound[start:stop]).all()
    with pytest.raises(CheckpointError, match=r"expected rank 4 of a by adapter_config\.json, found 3"):
        MergedLora(InMemory(base), InMemory(pair), model, {"r": 4, "lora_alpha": 6.0})


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
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"r": None}, "must hold the settings of LoRA"),
        ({"rank_pattern": [4]}, "must hold the settings of LoRA"),
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


# By setting of PEFT: values that add something else than B @ A to the base, or that were trained on another base.
REFUSED: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"),
    "use_dora": (True,),
    "lora_bias": (True,),
    "use_qalora": (True,),
    "trainable_token_indices": ([1], {"embed_tokens": [1]}),
    "alora_invocation_tokens": ([5],),
    "target_parameters": (["experts.gate_up_proj"],),
    "layer_replication": ([[0, 2], [1, 2]],),
    "megatron_config": ({"hidden_size": 8},),
    **dict.fromkeys(
        ("arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config"), ({"top_k": 3},)
    ),
}
LATER: dict[str, tuple[Any, ...]] = {"a_setting_of_a_later_version": (True, 1, "on")}


@pytest.mark.parametrize(("key", "value"), [(key, one) for key, all_ in (REFUSED | LATER).items() for one in all_])
def test_a_setting_that_is_not_known_to_be_added_rightly_is_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    model = Model("pretrained", path=str(tmp_path), adapter=str(tmp_path))
    for found, told in ((value, f"merge_and_unload, and give the folder it saves, found {key}={value}"), (None, None)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**PLAIN_LORA, key: found}))
        broken = adapter_folder.problem(model)
        assert broken is None if told is None else told in str(broken)


def _of_peft(folder: Path) -> tuple[dict[str, Any], set[str]]:
    """The settings of PEFT's LoRA with their defaults, after their file was saved; and its words for first values."""
    from peft import LoraConfig

    LoraConfig(r=8, lora_alpha=16).save_pretrained(str(folder))
    hint = get_type_hints(LoraConfig)["init_lora_weights"]
    return vars(LoraConfig()), {word for part in get_args(hint) for word in get_args(part)}


def test_each_setting_of_the_installed_peft_was_decided(tmp_path: Path) -> None:
    defaults, words = run_alone(_of_peft, tmp_path)
    fields = {key for key in defaults if not key.startswith("_")}
    assert fields == adapter_folder.ANY | adapter_folder.ONLY.keys() | REFUSED.keys(), "read what the new ones do"
    assert all(defaults[key] not in values for key, values in REFUSED.items())
    refused = {*REFUSED["init_lora_weights"], "pissa_niter_[number of iters]"}
    assert words <= refused | {*adapter_folder.ONLY["init_lora_weights"]}
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert adapter_folder.problem(Model("pretrained", path=str(tmp_path), adapter=str(tmp_path))) is None


@pytest.mark.parametrize(
    "words",
    [
        "generate model.path={} prompt=a",
        "measure=eval model=pretrained model.path={}",
        "measure=train model=pretrained model.path={} train.max_steps=1",
        "measure=train model=pretrained model.path={} model.adapter={} adapter=lora train.max_steps=1",
        "--plan model=pretrained model.path={}",
    ],
)
def test_each_command_that_reads_adapters_refuses_them_alike(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PLAIN_LORA, "init_lora_weights": "pissa"}))
    assert cli.main([*words.replace("{}", str(tmp_path)).split(), f"output={tmp_path}/out", "zero=stage0"]) == 2
    assert f"{tmp_path} must hold plain LoRA; merge it with PEFT's merge_and_unload" in capsys.readouterr().err


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
