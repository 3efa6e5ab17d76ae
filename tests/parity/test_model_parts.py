"""Parts of Hugging Face models that are called separately match the plain models at every stage: T5's generate,
backbones, tied embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from torch import nn

from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

IDS = torch.arange(1, 13).view(2, 6)
Calls = dict[str, Callable[[Any], torch.Tensor]]


def t5() -> tuple[nn.Module, Calls]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return T5ForConditionalGeneration(config), {
        "generate": lambda model: model.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3),
        "encoder": lambda model: model.get_encoder()(input_ids=IDS).last_hidden_state,
        "tied": lambda model: model.get_input_embeddings()(IDS),
    }


def gpt2() -> tuple[nn.Module, Calls]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), {
        "backbone": lambda model: model.transformer(IDS).last_hidden_state,
        "tied": lambda model: model.get_input_embeddings()(IDS),
        "head": lambda model: model.lm_head(torch.ones(1, 16)),
        "generate": lambda model: model.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False),
    }


def llama() -> tuple[nn.Module, Calls]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config), {
        "backbone": lambda model: model.model(IDS).last_hidden_state,
        "norm": lambda model: model.model.norm(torch.ones(1, 16)),
    }


def parts(make: Callable[[], tuple[nn.Module, Calls]]) -> list[str]:
    """Names of outputs that differ from the plain model's, by stage and step. The second step trains only the parts."""
    wrong = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model, calls = make()
        model.eval()  # no dropout
        plain = copy.deepcopy(model)
        plan = ZeroPlan.from_stage(stage)
        runtime = ZeroRuntime(model, plan, MixedPrecision(), AdamWConfig(), RuntimeSettings(), torch.device("cpu"))
        for step in range(3):
            with torch.no_grad():
                wrong += [
                    f"{name} at stage {stage}, step {step}"
                    for name, call in calls.items()
                    if not torch.equal(call(model), call(plain))
                ]
            trained = [call for name, call in calls.items() if name != "generate"] if step == 1 else [whole]
            runtime.backward(sum(call(model).square().mean() for call in trained))
            runtime.step(1e-2)
            with runtime.full_params() as values:
                plain.load_state_dict(values, strict=False)
        runtime.close()
    return wrong


def whole(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, labels=IDS).loss


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "make", [t5, pytest.param(gpt2, marks=pytest.mark.full), pytest.param(llama, marks=pytest.mark.full)]
)
def test_parts_of_a_model_have_the_outputs_of_the_plain_models_parts(
    make: Callable[[], tuple[nn.Module, Calls]], world: int
) -> None:
    for wrong in run_ranks(parts, world, make):
        assert wrong == []
