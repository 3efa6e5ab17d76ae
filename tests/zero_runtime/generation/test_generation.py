"""Ranks with sharded parameters generate different sequences, end together, and get the plain model's tokens."""

from __future__ import annotations

import copy
import pickle
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.copies import LateCopies
from harness.generation import ARCHITECTURES, Counted, answer, count_equal, inference_runtime, request_of, small_model
from harness.ranks import run_ranks

from zero_runtime.census import take_census
from zero_runtime.errors import CallOrderError, PlanError, RankError
from zero_runtime.generation.generate import StepwiseGenerate
from zero_runtime.limits import ConfigError
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings, Tier

SHORT, LONG = 4, 100


def check(counts: list[Counted], requests: int) -> None:
    assert [one.equal for one in counts] == [requests] * len(counts), [astuple(one) for one in counts]
    assert len({one.tokens for one in counts}) > 1, "the ranks generated equally many tokens"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_get_the_tokens_of_the_plain_model(architecture: str) -> None:
    check(run_ranks(count_equal, 2, architecture, SHORT), SHORT)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_four_ranks_get_the_tokens_of_the_plain_model_100_times(architecture: str) -> None:
    counts = run_ranks(count_equal, 4, architecture, LONG)
    check(counts, LONG)
    assert sum(one.early for one in counts) >= 10


def without_context(architecture: str, synced: bool) -> tuple[bool, int]:
    """(equal, gathers counted): `generate` called as transformers documents it, once after the other."""
    model = small_model(architecture)
    plain = copy.deepcopy(model)
    runtime = inference_runtime(model, 3)
    prompt = torch.full((1, 1 + 3 * dist.get_rank()), 5 + dist.get_rank())
    options: dict[str, Any] = {"synced_gpus": True} if synced else {}
    settings = {"max_new_tokens": 2 + 4 * dist.get_rank(), "do_sample": False}
    mask = torch.ones_like(prompt)
    found = [model.generate(prompt, attention_mask=mask, **settings, **options).tolist() for _ in range(2)]
    expected = plain.generate(prompt, attention_mask=mask, **settings).tolist()
    gathers = runtime.reset_ledger().data["all_gather"].calls
    return found == [expected, expected], gathers


@pytest.mark.parametrize("synced", [False, True])
def test_generate_needs_no_option_and_every_rank_makes_the_same_gathers(synced: bool) -> None:
    (first, gathers), (second, others) = run_ranks(without_context, 2, "gpt2", synced)
    assert first
    assert second
    assert gathers == others > 0


def at_the_last_position() -> list[int]:
    """The rank with the long prompt ends at the model's last position; the other rank goes on for 20 tokens."""
    model = small_model("gpt2")
    inference_runtime(model, 3)
    prompt = torch.full((1, 30 if dist.get_rank() == 0 else 4), 7)
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_length=32, eos_token_id=None)[0].tolist()


def test_a_rank_whose_sequence_has_ended_calls_the_model_no_more() -> None:
    assert [len(one) for one in run_ranks(at_the_last_position, 2)] == [32, 32]


def one_rank_fails() -> str:
    model = small_model("llama")
    runtime = inference_runtime(model, 3)

    def stop(_ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        raise KeyError("stop")

    options = {"stopping_criteria": [stop]} if dist.get_rank() == 1 else {}
    prompt = torch.full((1, 3), 7)
    try:
        runtime.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, eos_token_id=None, **options)
    except (KeyError, RankError) as error:
        return f"{type(error).__name__} {error}"
    return "none"


def test_an_error_of_one_rank_is_an_error_of_all() -> None:
    first, second = run_ranks(one_rank_fails, 2)
    assert first.startswith("RankError rank 1 left the generation")
    assert second == "KeyError 'stop'"


def refused() -> list[str]:
    found = []
    for number, offload in (
        (1, OffloadPlan()),
        (2, OffloadPlan()),
        (3, OffloadPlan(optimizer=Tier.HOST)),
        (0, OffloadPlan(params=Tier.HOST)),
    ):
        model = small_model("gpt2")
        with pytest.raises((ConfigError, PlanError)) as caught:
            inference_runtime(model, number, offload)
        assert all(param.requires_grad for param in model.parameters()) or number == 0
        found.append(str(caught.value))
    return found


def test_what_inference_does_not_have_is_refused_with_the_reason() -> None:
    (found, other) = run_ranks(refused, 2)
    assert found == other
    assert "all that stages 1 and 2 shard" in found[0]
    assert "zero.stage=1" in found[0]
    assert "zero.stage=2" in found[1]
    assert "offload.params=cpu" in found[2]


def inference_bytes(number: int) -> tuple[int, int, int, int]:
    """(bytes of params, grads, optimizer; bytes of the model) on this rank."""
    model = small_model("llama")
    size = sum(param.numel() for param in model.parameters()) * 4
    runtime = inference_runtime(model, number)
    census = take_census(runtime)
    with pytest.raises(CallOrderError, match="for inference"):
        runtime.step(1e-3)
    with pytest.raises(CallOrderError, match="for inference"):
        runtime.backward(torch.zeros(()))
    return census.params, census.grads, census.optimizer, size


@pytest.mark.parametrize("number", [0, 3])
def test_inference_holds_weights_only(number: int) -> None:
    for params, grads, optimizer, size in run_ranks(inference_bytes, 2, number):
        assert grads == optimizer == 0
        padding = 2 * 4 * 64 * 5  # at most one border of 64 elements for each of the five units
        assert 0 <= params - (size if number == 0 else size // 2) <= padding


def from_scratch_file(folder: str, copies: bool) -> bool:
    model = small_model("t5")
    plain = copy.deepcopy(model)
    scratch = None if copies else ScratchSettings(Path(folder))
    tier = Tier.HOST if copies else Tier.NVME
    offload = OffloadPlan(tier, tier, scratch=scratch, copies=LateCopies if copies else None)
    runtime = inference_runtime(model, 3, offload)
    right = True
    for number in range(3):
        asked = request_of(number, dist.get_rank())
        with runtime.uneven_forwards():
            right &= answer(model, asked) == answer(plain, asked)
    runtime.close()
    return right


@pytest.mark.parametrize("copies", [False, True], ids=["scratch file", "host memory"])
def test_weights_may_be_on_the_host_or_in_a_scratch_file(copies: bool, tmp_path: Path) -> None:
    assert all(run_ranks(from_scratch_file, 2, str(tmp_path), copies))


def copies_are_plain() -> bool:
    model = small_model("gpt2")
    expected = answer(copy.deepcopy(model), request_of(0, 0))
    runtime = inference_runtime(model, 3)
    assert isinstance(model.__dict__["generate"], StepwiseGenerate)
    with runtime.full_params() as values:
        pass
    copied = pickle.loads(pickle.dumps(StepwiseGenerate(small_model("gpt2"), runtime.uneven_forwards)))
    assert "generate" not in copied.__self__.__dict__
    runtime.close()
    assert "generate" not in model.__dict__
    copied.__self__.load_state_dict(values, strict=False)
    return answer(copied.__self__, request_of(0, 0)) == expected


def test_a_copy_of_a_model_has_its_own_generate() -> None:
    assert all(run_ranks(copies_are_plain, 2))
