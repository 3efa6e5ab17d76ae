"""Models of odd shapes are divided, or refused with the nearest degrees; settings that do not fit are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.divided import KINDS, ODD_KINDS, WIDTH, DividedRun, model_of
from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.limits import ConfigError
from zero_runtime.optim.config_base import OptimizerConfig
from zero_runtime.optim.configs import AdamW8bitConfig, AdamWConfig, LambConfig, MuonConfig, OneBitAdamConfig
from zero_runtime.parallel.tensor.division import TensorParallel
from zero_runtime.parallel.tensor.plan import plan_split
from zero_runtime.parallel.tensor.refusals import check_divided

THIRDS = {"num_attention_heads": 3, "intermediate_size": 42}
SIXTHS = {"num_attention_heads": 6, "intermediate_size": 42}


def meta_model(kind: str, **others: Any) -> nn.Module:
    with torch.device("meta"):
        return model_of(kind, **others)


@pytest.mark.parametrize("kind", [*KINDS, *ODD_KINDS])
def test_two_slices_hold_half_of_every_matrix_and_the_vocabulary_is_padded(kind: str) -> None:
    model = meta_model(kind)
    plan = plan_split(model, 2)
    matrices = {name: tuple(param.shape) for name, param in model.named_parameters() if param.dim() == 2}
    whole = [name for name in matrices if name not in plan.splits]
    assert [name for name in whole if "wpe" not in name] == []  # GPT-2's positions are replicated
    for name, split in plan.splits.items():
        padding = 2 * split.local_numel - split.numel
        is_vocabulary = model.config.vocab_size in split.shape
        assert padding == (split.numel // model.config.vocab_size if is_vocabulary else 0), name


@pytest.mark.parametrize(
    ("kind", "others", "degree", "message"),
    [
        ("llama", {}, 4, r"2 heads of .*k_proj, found 4; use parallel.tp=1 or parallel.tp=2, which fits"),
        ("llama", {"num_key_value_heads": 1}, 2, r"1 heads of .*k_proj, found 2; use parallel.tp=1, which fits"),
        ("qwen2", SIXTHS | {"num_key_value_heads": 3}, 2, r"3 heads of .*k_proj, found 2; .*tp=1 or parallel.tp=3"),
        ("neox", THIRDS, 2, r"3 heads of .*query_key_value, found 2; use parallel.tp=1 or parallel.tp=3"),
        ("neox", {"intermediate_size": 42}, 4, r"42 columns of .*dense_h_to_4h, found 4; .*tp=1 or parallel.tp=2"),
        ("gpt2", {"n_inner": 45}, 2, r"45 columns of .*c_fc"),
        ("t5", {"num_heads": 3, "d_ff": 42}, 2, r"3 heads of .*SelfAttention.q, found 2; .*tp=1 or parallel.tp=3"),
        ("t5_gated_untied", {"d_ff": 41}, 2, r"41 columns of .*wi_0"),
    ],
)
def test_heads_and_widths_that_do_not_divide_are_refused_with_the_nearest_degrees(
    kind: str, others: dict[str, Any], degree: int, message: str
) -> None:
    with pytest.raises(PlanError, match=rf"parallel.tp={degree}: expected a divisor of the {message}"):
        plan_split(meta_model(kind, **others), degree)


def test_patterns_can_replicate_a_layer_and_unknown_ones_are_refused() -> None:
    patterns = ("*.mlp.*=replicated",)
    assert not [name for name in plan_split(meta_model("llama"), 2, patterns).splits if ".mlp." in name]
    with pytest.raises(PlanError, match="expected 'nothing' to match a linear layer"):
        plan_split(meta_model("llama"), 2, ("nothing=column",))


class FusedGate(nn.Module):
    """A block whose first layer holds two matrices in an order that its shape does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(8, 32)
        self.down = nn.Linear(16, 8)


def test_a_fused_layer_of_unknown_order_is_refused_unless_a_pattern_describes_it() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(FusedGate() for _ in range(2))
    with pytest.raises(PlanError, match=r"expected blocks.0.both to have 16 outputs.*'blocks.0.both=column:N'"):
        plan_split(model, 2)
    plan = plan_split(model, 2, ("*.both=column:2", "*.down=row"))
    assert plan.splits["blocks.0.both.weight"].parts == (16, 16)


def with_adapters(**settings: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model_of("llama"), LoraConfig(r=2, **settings))  # type: ignore[arg-type]


def test_adapters_are_divided_as_their_layers() -> None:
    model = with_adapters(target_modules="all-linear")
    plan = plan_split(model, 2)
    layer = "base_model.model.model.layers.0.self_attn"
    a, b = (f"{layer}.{{}}.lora_{part}.default.weight".format for part in "AB")
    assert plan.splits[f"{layer}.q_proj.base_layer.weight"].dim == 0
    assert plan.splits[b("q_proj")].local_shape == (WIDTH // 2, 2)
    assert plan.splits[a("o_proj")].local_shape == (2, WIDTH // 2)
    assert {a("q_proj"), b("o_proj")}.isdisjoint(plan.splits)
    names = {name for name, _ in model.named_parameters()}
    whole = {name for name in names if "lora_A" in name or "norm" in name or (".lora_B." in name)}  # in parts of tokens
    assert plan.summed == whole - plan.splits.keys()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "one LoRA adapter with A and B at .*q_proj, found Linear"),
        ({"target_modules": ["embed_tokens"]}, "adapters at linear layers of the blocks, found one at .*embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapters at linear layers of the blocks, found one at .*lm_head"),
    ],
    ids=["dora", "embedding", "head"],
)
def test_other_adapters_are_refused_by_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=f"{told}.*use adapter=none, or parallel.tp=1"):
        plan_split(with_adapters(**settings), 2)


@pytest.mark.parametrize(
    ("kind", "others", "found"),
    [("gpt2", {"embd_pdrop": 0.1}, "0.1 in transformer.drop"), ("llama", {"attention_dropout": 0.5}, "0.5 in model.l")],
)
def test_dropout_is_refused_in_training_alone(kind: str, others: dict[str, Any], found: str) -> None:
    model, tensor = meta_model(kind, **others), TensorParallel(2)
    with pytest.raises(PlanError, match=rf"without dropout.*dropout={found}.*set the model's dropout to 0"):
        tensor.plan(model)
    assert tensor.plan(model, trains=False).degree == 2


def test_a_degree_that_does_not_divide_the_ranks_is_refused() -> None:
    assert TensorParallel(2).data_world(6) == 3
    with pytest.raises(PlanError, match=r"parallel\.tp=4: expected a divisor of the 6 ranks"):
        TensorParallel(4).data_world(6)
    with pytest.raises(PlanError, match="expected at least 1"):
        TensorParallel(0)


# ---- settings --------------------------------------------------------------------------------------------------------


def test_an_optimizer_with_one_scale_for_slices_and_replicas_is_refused_by_name() -> None:
    check_divided(1, OneBitAdamConfig())
    with pytest.raises(ConfigError) as error:
        check_divided(2, OneBitAdamConfig())
    for word in ("optimizer.kind=onebitadam", "found parallel.tp=2", "parallel.tp=1"):
        assert word in str(error.value)


@pytest.mark.parametrize("optimizer", [AdamWConfig(), AdamW8bitConfig(), LambConfig(), MuonConfig(), None])
def test_other_settings_are_allowed(optimizer: OptimizerConfig | None) -> None:
    check_divided(2, optimizer)


def test_a_runtime_refuses_before_the_model_is_changed() -> None:
    model = model_of("llama")
    with pytest.raises(ConfigError, match=r"optimizer\.kind=onebitadam"):
        DividedRun("llama", optimizer=OneBitAdamConfig()).runtime(model)
    assert all(param.requires_grad for param in model.parameters())
