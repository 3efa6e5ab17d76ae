"""A configured model with tensor or sequence parallelism: its shapes, its messages, and what cannot be divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from points import config_of

from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Device, Model, RunConfig
from orchestrator.wings.predict import activations, shapes
from orchestrator.wings.predict.tensor_messages import TensorMessages
from zero_runtime.activations.rule import RecomputeRule

GPT2 = {"vocab_size": 65, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
}


def divided(kind: str, sizes: dict[str, Any], tp: int) -> RunConfig:
    return replace(config_of(4, every=None), model=Model("tiny", kind, sizes), parallel=Parallel(tp))


def shapes_in(answer: dict[str, Any]) -> dict[str, list[int]]:
    return {name: shape for unit in answer["units"] for name, shape in unit["shapes"]}


def test_a_rank_has_slices_and_the_numbers_of_elements_are_those_of_the_model() -> None:
    full, half = (shapes.units_of(divided("gpt2", GPT2, tp)) for tp in (1, 2))
    whole, own = shapes_in(full), shapes_in(half)
    assert own["transformer.wte.weight"] == [33, 32]  # a row of padding on the second rank
    assert own["transformer.h.0.attn.c_attn.weight"] == [32, 48]
    assert own["transformer.h.0.mlp.c_proj.weight"] == [64, 32]
    assert own["transformer.h.0.ln_1.weight"] == whole["transformer.h.0.ln_1.weight"]
    assert [unit["numel"] for unit in half["units"]] == [unit["numel"] for unit in full["units"]]


@pytest.mark.parametrize(
    ("kind", "sizes", "blocks", "width", "in_block"), [("gpt2", GPT2, 3, 32, 6), ("llama", LLAMA, 2, 48, 2)]
)
def test_a_block_has_ten_messages_of_parts_and_repeats_three(
    kind: str, sizes: dict[str, Any], blocks: int, width: int, in_block: int
) -> None:
    """in_block: replicated parameters; GPT-2's norms have a bias, and so have its row layers."""
    found = TensorMessages.of_plain(shapes.units_of(divided(kind, sizes, 2))["tensor"])
    replicated = (width,) * (in_block * blocks + (2 if kind == "gpt2" else 1))
    parts = (width,) * (10 * blocks + 3)  # and of the head's input, and of the first block's gradient
    assert found == TensorMessages((width,), ((width,) * 3,) * blocks, replicated, 3, parts=parts, head=width)
    assert TensorMessages.of_plain(shapes.units_of(divided(kind, sizes, 1))["tensor"]) == TensorMessages()


@pytest.mark.parametrize(("kind", "name"), [("none", "kept"), ("full", "peak")])
def test_activations_of_a_rank_are_those_of_a_degrees_part(kind: Any, name: str) -> None:
    """Not divided are token ids, labels and numbers of the loss: below 3 % of what this model keeps."""
    found = {}
    for tp in (1, 2, 4):
        config = divided("gpt2", {**GPT2, "n_embd": 128, "n_layer": 8, "vocab_size": 64}, tp)
        config = replace(config, recompute=RecomputeRule(kind), resources=replace(config.resources, device=Device.cuda))
        config = replace(config, batch=replace(config.batch, micro=8, seq=64))
        (counted,) = [one["bytes"] for _, one in activations.answers([config]) if "bytes" in one]
        found[tp] = counted
    for tp in (2, 4):
        assert found[tp][name] * tp / found[1][name] <= 1.03, (tp, found)


def test_heads_that_do_not_divide_are_a_problem_with_the_nearest_degrees_that_do() -> None:
    answer = shapes._answer(divided("llama", LLAMA, 4))
    assert answer is not None
    assert "parallel.tp=4: expected a divisor of the 6 heads" in answer["problem"]
    assert "parallel.tp=2 or parallel.tp=3" in answer["problem"]


# ---- sequence parallelism --------------------------------------------------------------------------------------------


def in_parts(kind: str, sizes: dict[str, Any], sp: int) -> RunConfig:
    return replace(config_of(4, every=None), model=Model("tiny", kind, sizes), parallel=Parallel(sp=sp))


@pytest.mark.parametrize(
    ("kind", "sizes", "sp", "block", "blocks"),
    [
        ("gpt2", GPT2, 4, (3 * 32, 32), 3),
        ("llama", LLAMA, 3, ((12 + 2 * 6) * 4, 48), 2),
        ("llama", LLAMA, 12, ((12 + 2 * 12) * 4, 48), 2),  # each key and value head on two ranks
    ],
)
def test_a_rank_has_full_shapes_and_trades_heads_twice_in_a_block(
    kind: str, sizes: dict[str, Any], sp: int, block: tuple[int, int], blocks: int
) -> None:
    full, part = shapes.units_of(divided(kind, sizes, 1)), shapes.units_of(in_parts(kind, sizes, sp))
    assert shapes_in(part) == shapes_in(full)
    assert TensorMessages.of_plain(part["tensor"]) == TensorMessages(traded=(block,) * blocks)


def test_heads_that_the_parts_do_not_divide_are_a_problem_with_the_nearest_degrees_that_do() -> None:
    answer = shapes._answer(in_parts("llama", LLAMA, 4))
    assert answer is not None
    assert "parallel.sp=4: expected a divisor of the 12 attention heads" in answer["problem"]
    assert "use parallel.sp=3 or parallel.sp=6" in answer["problem"]


def test_a_model_that_may_mix_tokens_outside_of_its_attention_is_a_problem() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    answer = shapes._answer(in_parts("opt", {"vocab_size": 64, **sizes, "word_embed_proj_dim": 32}, 2))
    assert answer is not None
    assert "parallel.sp=2: expected a model of transformers that is known to mix tokens" in answer["problem"]
    assert "found opt" in answer["problem"]
