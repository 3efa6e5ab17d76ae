"""The model that the benchmarks train has GPT-2's initial values, so that its numbers are typical of training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks.gpt import STD, Gpt, GptSize, draw_tokens, loss_of, starting_loss, starting_loss_trouble
from zero_runtime.initial_values import InitialValues, parameters_on_meta

SIZES = [GptSize(), GptSize(layers=2, width=64, heads=4, vocab=512, seq=64, micro=2)]


def mean_loss(model: Gpt) -> float:
    ids = draw_tokens(model.size, seed=1)
    with torch.no_grad():
        return float(loss_of(model, ids[:, :-1], ids[:, 1:])) / (model.size.micro * model.size.seq)


def trouble(model: Gpt) -> str | None:
    return starting_loss_trouble(model.size, model.size.micro * model.size.seq, {"row": mean_loss(model)})


@pytest.mark.parametrize("size", SIZES, ids=["the benchmark's", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_model_has_the_starting_loss(size: GptSize, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert trouble(Gpt(size).to(dtype)) is None


def test_the_starting_loss_is_ln_v_plus_half_of_the_logits_variance() -> None:
    expected, allowed = starting_loss(GptSize(), 1024)
    assert expected == pytest.approx(math.log(8192) + 512 * 0.02**2 / 2)
    assert allowed < 0.1  # narrow enough to detect the logits of another initialization


def test_torchs_default_initial_values_are_refused() -> None:
    model = Gpt(SIZES[1])
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            module.reset_parameters()
    found = trouble(model)
    assert found is not None
    assert "expected a starting loss of" in found


def test_a_loss_that_is_not_a_number_is_refused_and_only_the_wrong_rows_are_named() -> None:
    expected, _ = starting_loss(GptSize(), 1024)
    found = starting_loss_trouble(GptSize(), 1024, {"right": expected, "wrong": math.nan})
    assert found is not None
    assert "found wrong nan:" in found


def test_neither_the_probabilities_nor_the_gradients_of_the_first_step_are_denormal() -> None:
    torch.manual_seed(0)
    model = Gpt(SIZES[1])
    ids = draw_tokens(model.size, seed=1)
    loss_of(model, ids[:, :-1], ids[:, 1:]).backward()
    probabilities = model(ids[:, :-1]).softmax(-1)
    for values in (probabilities, *(param.grad for param in model.parameters())):
        assert values is not None
        assert not bool(((values != 0) & (values.abs() < torch.finfo(torch.float32).tiny)).any())


def test_parameters_that_are_drawn_later_have_gpt2s_initial_values() -> None:
    with parameters_on_meta():
        model = Gpt(SIZES[1])
    birth = InitialValues(model, seed=0)
    drawn = {name: birth.draw(name, param) for name, param in model.named_parameters()}
    assert all(bool((value == 0).all()) for name, value in drawn.items() if name.endswith(".bias"))
    assert all(bool((value == 1).all()) for name, value in drawn.items() if "norm" in name and "weight" in name)
    scaled = STD / math.sqrt(2 * model.size.layers)
    for name, deviation in {"tokens": STD, "positions": STD, "blocks.0.qkv": STD, "blocks.1.down": scaled}.items():
        value = drawn[f"{name}.weight"]
        # The relative error of the standard deviation of n samples is 1 / sqrt(2 n); six of those are allowed.
        assert float(value.std()) == pytest.approx(deviation, rel=6 / math.sqrt(2 * value.numel()))


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    assert torch.equal(draw_tokens(SIZES[1], seed=3), draw_tokens(SIZES[1], seed=3))
    assert not torch.equal(draw_tokens(SIZES[1], seed=3), draw_tokens(SIZES[1], seed=4))
