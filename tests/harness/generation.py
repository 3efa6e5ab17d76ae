"""Small transformers of three architectures, and requests for tokens that differ between the ranks."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zero_runtime.offload_plan import OffloadPlan
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

ARCHITECTURES = ("gpt2", "llama", "t5")
VOCAB = 29
END = 1  # the token that ends a sequence
ENDS = [END, 5, 9, 13, 17, 21]  # tokens that end the sequences of requests, so that many end early
MOST_NEW = 10


def small_model(architecture: str, seed: int = 3) -> Any:
    """A decoder (gpt2), a decoder with grouped heads (llama), or an encoder-decoder (t5), with random weights."""
    import transformers as hf

    ends = {"eos_token_id": END, "pad_token_id": 0, "bos_token_id": 2}
    configs = {
        "gpt2": lambda: hf.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=20, n_layer=3, n_head=2, **ends),
        "llama": lambda: hf.LlamaConfig(
            vocab_size=VOCAB, hidden_size=24, intermediate_size=36, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, **ends
        ),
        "t5": lambda: hf.T5Config(
            vocab_size=VOCAB, d_model=20, d_kv=8, d_ff=36, num_layers=2, num_heads=2,
            decoder_start_token_id=0, **ends
        ),
    }  # fmt: skip
    classes = {"gpt2": hf.GPT2LMHeadModel, "llama": hf.LlamaForCausalLM, "t5": hf.T5ForConditionalGeneration}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = classes[architecture](configs[architecture]())
        for param in model.parameters():  # so large that greedy sequences differ, and some end early
            param.data.mul_(6.0)
    return model.eval()


@dataclass(frozen=True)
class Request:
    """Prompts [batch, length] of one rank, the most tokens for each, and the beams of the search; without prompts the
    rank makes no call."""

    prompts: torch.Tensor | None
    new_tokens: int
    beams: int = 1


def request_of(number: int, rank: int) -> Request:
    """The request `number` of one rank: batches of 1 to 3 prompts of 1 to 12 tokens; every sixth rank has none."""
    draw = random.Random(f"{number}/{rank}")
    if draw.random() < 1 / 6:
        return Request(None, 0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 13))] for _ in range(1)]
    prompts *= draw.randrange(1, 4)
    return Request(torch.tensor(prompts), draw.randrange(1, MOST_NEW + 1), draw.choice((1, 3)))


def answer(model: Any, request: Request) -> list[list[int]]:
    """The likeliest tokens for a request; every rank calls it, also one without prompts."""
    if request.prompts is None:
        return []
    settings = {"max_new_tokens": request.new_tokens, "num_beams": request.beams, "eos_token_id": ENDS}
    mask = torch.ones_like(request.prompts)
    return model.generate(request.prompts, attention_mask=mask, do_sample=False, **settings).tolist()


def inference_runtime(model: Any, number: int, offload: OffloadPlan | None = None) -> ZeroRuntime:
    settings = RuntimeSettings(**({} if offload is None else {"offload": offload}))
    plan = ZeroPlan.from_stage(number)
    return ZeroRuntime(model, plan, MixedPrecision(), None, settings, torch.device("cpu"))


@dataclass(frozen=True)
class Counted:
    """Of one rank: requests, those with the plain model's tokens, generated tokens, sequences that ended early."""

    requests: int
    equal: int
    tokens: int
    early: int


def count_equal(architecture: str, requests: int) -> Counted:
    """Generate on this rank of an initialized world with sharded parameters, and on a plain model; compare."""
    model = small_model(architecture)
    plain = copy.deepcopy(model)
    runtime = inference_runtime(model, 3)
    equal = tokens = early = 0
    for number in range(requests):
        asked = request_of(number, dist.get_rank())
        with runtime.uneven_forwards():
            found = answer(model, asked)
        expected = answer(plain, asked)
        equal += found == expected
        tokens += sum(len(one) for one in found)
        given = 1 if architecture == "t5" or asked.prompts is None else asked.prompts.shape[1]
        early += sum(len(one) - given < asked.new_tokens for one in found)
    runtime.close()
    return Counted(requests, equal, tokens, early)
