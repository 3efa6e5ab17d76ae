"""A folder of adapters is the model that PEFT makes of it, and all-linear means what it means there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import run_alone, run_ranks
from harness.small_folders import IDS, KINDS, LORA, config_of, runtime_of

from orchestrator.config import pretrained
from orchestrator.config.schema import Model

# Folders that PEFT writes: the base, and its settings beside rank, alpha and layers. The first pattern that matches
# counts, and PEFT sorts them when it writes.
LAYERS = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
PATTERNS = {"rank_pattern": {r"0\..*": 8, "up_proj": 2}, "alpha_pattern": {"1.mlp.up_proj": 3, "up_proj": 9}}
GPT2 = {"target_modules": ["c_attn", "mlp.c_fc"]}  # layers with biases, whose weights are [inputs, outputs]
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "rslora": ("llama", {"use_rslora": True}),
    "ranks": ("llama", {"rank_pattern": PATTERNS["rank_pattern"]}),
    "ranks-rslora": ("llama", {"rank_pattern": PATTERNS["rank_pattern"], "use_rslora": True}),
    "alphas": ("llama", {"alpha_pattern": PATTERNS["alpha_pattern"]}),
    "both-rslora": ("llama", {**PATTERNS, "use_rslora": True}),
    "both-gpt2": ("gpt2", {**GPT2, "bias": "all", "rank_pattern": {"c_attn": 2}, "alpha_pattern": {"h.0.mlp.c_fc": 5}}),
    "lora-biases": ("gpt2", {**GPT2, "bias": "lora_only"}),
    "saved": ("llama", {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "rank_pattern": {"embed_tokens": 2}}),
    "all-linear": ("llama", {"target_modules": "all-linear", "exclude_modules": ["o_proj"], "lora_dropout": 0.5}),
    "some-layers": ("llama", {"layers_to_transform": [1], "layers_pattern": "layers"}),
    **{name: ("llama", {"init_lora_weights": name}) for name in ("gaussian", "orthogonal", "mica")},
    "eva": ("llama", {**PATTERNS, "init_lora_weights": "eva"}),  # which gives layers ranks and alphas of their own
    "converted": ("llama", {"init_lora_weights": "pissa", "rank_pattern": {"up_proj": 2}}),
}


def _write_adapters(root: Path) -> dict[str, torch.Tensor]:
    """Writes folders of models, and those of WRITTEN with PEFT. Returns the logits of the models that PEFT makes of
    them, by name, and those of the bases."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    torch.manual_seed(7)
    for kind, config in KINDS.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()
        model.save_pretrained(root / kind)
        with torch.no_grad():
            found[kind] = model(input_ids=IDS).logits
    for name, (base, settings) in WRITTEN.items():
        peft: Any = get_peft_model(
            AutoModelForCausalLM.from_pretrained(root / base), LoraConfig(**{**LAYERS, **settings})
        )
        initial = None
        if name == "converted":
            initial = str(root / "initial")
            peft.save_pretrained(initial)
        with torch.no_grad():
            for value in (one for one in peft.parameters() if one.requires_grad):
                value.add_(torch.randn_like(value), alpha=0.1)
        peft.save_pretrained(root / name, path_initial_model_for_weight_conversion=initial)
        plain = AutoModelForCausalLM.from_pretrained(root / base)
        merged = PeftModel.from_pretrained(plain, root / name).merge_and_unload().eval()
        with torch.no_grad():
            found[name] = merged(input_ids=IDS).logits
    return found


def _read_adapters(root: Path) -> dict[str, torch.Tensor]:
    """By folder of WRITTEN: the logits of the model that it is here. One rank reads whole matrices, as PEFT does."""
    found = {}
    for name, (base, _) in WRITTEN.items():
        config = config_of(root / base, stage=0)
        runtime = runtime_of(replace(config, model=replace(config.model, adapter=str(root / name))))
        with torch.no_grad():
            found[name] = runtime(input_ids=IDS, use_cache=False).logits
        runtime.close()
    return found


def test_a_folder_of_adapters_is_the_model_that_peft_makes_of_it(tmp_path: Path) -> None:
    wanted = run_alone(_write_adapters, tmp_path)
    (found,) = run_ranks(_read_adapters, 1, tmp_path)
    for name, (kind, _) in WRITTEN.items():
        assert not torch.equal(wanted[name], wanted[kind]), name
        assert torch.equal(found[name], wanted[name]), name
        model = pretrained.completed(Model("pretrained", path=str(tmp_path / kind), adapter=str(tmp_path / name)))
        assert pretrained.problem(model) is None


def _trained(kind: str, layers: list[str]) -> list[dict[str, tuple[int, ...]]]:
    """The parameters that a run trains with all-linear, and with the layers by name; and those of PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from orchestrator.worker.setup import build_deferred

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]))
    models = [get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))]
    for targets in (["all-linear"], layers):
        of = Model(kind, kind, KINDS[kind])
        config = replace(config_of(Path("none")), model=of, adapter=replace(LORA, targets=targets))
        models.append(build_deferred(config)[0])  # type: ignore[arg-type]
    return [{name: (*one.shape,) for name, one in model.named_parameters() if one.requires_grad} for model in models]


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
    ],
)
def test_all_linear_trains_what_it_trains_in_peft(kind: str, layers: list[str]) -> None:
    peft, named, listed = run_alone(_trained, kind, layers)
    assert named == listed == peft
    assert not any("lm_head" in name for name in named)
