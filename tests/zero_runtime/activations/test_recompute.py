"""Activation checkpointing changes no bits, keeps less memory and adds no collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from harness.ranks import run_ranks
from harness.shapes import Adapters, Base, BorrowedInHead, FrozenMiddle, Layer, Parallel, Repeated, build_shape, ids_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from orchestrator.workloads.models import build_deferred_model
from zero_runtime.activations.recompute import Recomputation, RecomputeRule
from zero_runtime.census import ActivationCensus
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

STAGES = (0, 1, 2, 3)
RULES = [RecomputeRule(), RecomputeRule("full"), RecomputeRule("every_nth", 2), RecomputeRule("by_operation")]
SECOND = RecomputeRule("by_operation", products=2)


class DropoutLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(
            self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.3, self.training)), 0.2, self.training
        )


class Dropout(Base):
    layer = DropoutLayer


class ReentrantLayer(DropoutLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Reentrant(Base):
    layer = ReentrantLayer


class ReentrantTwice(Repeated):
    """Each use of a block has a separate backward, so its gradients arrive in two parts."""

    layer = ReentrantLayer


class DropoutTwice(Repeated):
    layer = DropoutLayer


class ReentrantAround(Base):
    """The checkpoint is outside the block, so the block's hooks see a forward without gradients, then another one."""

    layer = DropoutLayer

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def runtime_of(model: nn.Module, stage: int, **settings: Any) -> ZeroRuntime:
    return ZeroRuntime(
        model,
        ZeroPlan.from_stage(stage),
        MixedPrecision(),
        AdamWConfig(),
        RuntimeSettings(**settings),
        torch.device("cpu"),
    )


def losses(model: nn.Module, stage: int, micro_batches: int = 2) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses of four steps and the sum of each final weight; calls and elements of the last step's collectives."""
    runtime = runtime_of(model, stage, micro_batches=micro_batches)
    rank, found = dist.get_rank(), []
    torch.manual_seed(rank)
    for step in range(4):
        runtime.reset_ledger()
        for micro in range(micro_batches):
            runtime.backward(runtime.model.loss_of(runtime(ids_of(2 * step + micro, rank))) / 100)
        found.append(runtime.step(1e-2).loss)
    ledger = runtime.reset_ledger()
    with runtime.full_params() as weights:
        found += [float(value.double().sum()) for value in weights.values()]
    runtime.close()
    return found, sorted((volume.calls, volume.elements) for volume in ledger.data.values())


def _rules(stages: tuple[int, ...]) -> None:
    for kind in (Dropout, DropoutTwice, Adapters, FrozenMiddle, BorrowedInHead, Parallel):
        for stage in stages:
            results = []
            for rule in (*RULES, SECOND):
                model = build_shape(kind)
                recomputation = Recomputation(model, rule)
                results.append(losses(model, stage))
                recomputation.remove()
                assert not any("forward" in vars(module) for module in model.modules())
            assert all(result == results[0] for result in results), (kind, stage)


def _kept() -> dict[str, int]:
    """Bytes that a forward of 2,000 tokens keeps for backward, by rule."""
    kept = {}
    for rule in RULES:
        model = build_shape(Dropout)
        Recomputation(model, rule)
        runtime = runtime_of(model, 3)
        with ActivationCensus(runtime) as activations:
            loss = runtime.model.loss_of(runtime(ids_of(0, 0).repeat(100, 2)))
        kept[rule.kind] = activations.bytes
        del loss
    return kept


def test_each_rule_keeps_fewer_bytes_than_no_recomputation() -> None:
    kept = run_ranks(_kept, 1)[0]
    assert kept["full"] < kept["every_nth"] < kept["none"]
    assert kept["full"] < kept["by_operation"] < kept["none"]


def _kept_of_llama() -> list[int]:
    """Bytes that a forward of 64 tokens keeps if every product is kept, and if every second one is."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    kept = []
    for products in (1, 2):
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=61)
        model = transformers.LlamaForCausalLM(config)
        Recomputation(model, RecomputeRule("by_operation", products=products))
        runtime = runtime_of(model, 0)
        with ActivationCensus(runtime) as activations:
            found = runtime(torch.ones((2, 32), dtype=torch.int64))
        kept.append(activations.bytes)
        del found
    return kept


def test_every_second_product_of_a_llama_block_is_torchtitans_list() -> None:
    """torchtitan keeps those of q, v, gate and down, and has those of k, o and up computed again."""
    every, second = run_ranks(_kept_of_llama, 1)[0]
    assert every - second == 3 * 64 * 4 * (16 + 32 + 48)  # layers, tokens, fp32


@pytest.mark.parametrize(
    ("world", "stages"),
    [(1, (0, 3)), *(pytest.param(*one, marks=pytest.mark.full) for one in ((1, (1, 2)), (2, STAGES)))],
)
def test_every_rule_has_the_bits_and_collectives_of_no_recomputation_even_with_dropout(
    world: int, stages: tuple[int, ...]
) -> None:
    run_ranks(_rules, world, stages)


def _reentrant(stages: tuple[int, ...]) -> None:
    for stage in stages:
        wanted = losses(build_shape(Dropout), stage)
        assert losses(build_shape(Reentrant), stage) == wanted, stage
        assert losses(build_shape(ReentrantAround), stage) == wanted, stage
        # The runtime adds the two parts of a gradient; autograd adds the same two. (With an earlier micro-batch, which
        # the runtime adds first to one part and autograd last to the sum, the roundings would differ.)
        parts, whole = (losses(build_shape(kind), stage, 1) for kind in (ReentrantTwice, DropoutTwice))
        assert parts[0] == whole[0], stage


@pytest.mark.full
@pytest.mark.parametrize(("world", "stages"), [(2, (1, 3)), (1, STAGES), (2, (0, 2))])
def test_reentrant_checkpoints_inside_and_around_blocks_change_no_results(world: int, stages: tuple[int, ...]) -> None:
    run_ranks(_reentrant, world, stages)


class Transformer(nn.Module):
    """A transformers model with the interface of the other models in this file."""

    def __init__(self, kind: str, config: dict[str, Any]) -> None:
        super().__init__()
        self.inner = build_deferred_model(kind, config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits

    def loss_of(self, output: torch.Tensor) -> torch.Tensor:
        return output.float().logsumexp(-1).sum()


def _transformers(kind: str) -> None:
    llama = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    gpt2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = {"llama": llama, "gpt2": gpt2}[kind]
    results = []
    for rule in RULES:
        model = Transformer(kind, config)
        assert len(Recomputation(model, rule).blocks) == {"none": 0, "every_nth": 1}.get(rule.kind, 2)
        results.append(losses(model, 3))
    model = Transformer(kind, config)
    model.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    results.append(losses(model, 3))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.full), "gpt2"])
def test_transformers_models_have_the_same_losses_with_our_rules_and_with_their_own(kind: str) -> None:
    run_ranks(_transformers, 2, kind)


def test_every_nth_takes_the_last_of_every_n_blocks() -> None:
    model = Base(blocks=7)
    for every, picked in ((1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (3, [2, 5]), (7, [6]), (8, [])):
        assert RecomputeRule("every_nth", every).picks(list(model.blocks)) == [model.blocks[i] for i in picked]


def test_invalid_rules_are_refused() -> None:
    with pytest.raises(PlanError, match=r"recompute\.kind must be one of none, full, .* found half"):
        RecomputeRule("half")
    with pytest.raises(PlanError, match=r"recompute\.every must be at least 1, found 0"):
        RecomputeRule("every_nth", 0)
    with pytest.raises(PlanError, match=r"expected a model with an nn\.ModuleList .* none in Linear"):
        Recomputation(nn.Linear(2, 2), RecomputeRule("full"))
