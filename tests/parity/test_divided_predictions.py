"""Memory and messages of a step with tensor or sequence parallelism, and of models that are no causal language models,
are those that a plan predicts, on four ranks.

Compared as benchmarks/predicted_peaks.py does: states between two steps, the most that torch's allocator gave out above
them in a step, and the bytes in the ledger.
"""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from harness.ranks import run_ranks

from benchmarks.predicted_peaks import ALLOWED_WORST, WARM_UP, Case, allocated, config_of
from orchestrator.config.optimizer import Optimizer
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Adapter, AdapterKind, Data, DataKind, Model, RunConfig
from orchestrator.config.state_groups import Zero
from orchestrator.wings.kinds.classes import zeros
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict.activations import answers
from orchestrator.wings.predict.memory_cache import activations_key, units_key
from orchestrator.wings.predict.shapes import units_of
from orchestrator.wings.predict.step import Memories
from orchestrator.worker.setup import build_runtime
from orchestrator.workloads.models import token_losses
from zero_runtime.census import take_census
from zero_runtime.optim.configs import MuonConfig
from zero_runtime.parallel.tensor.division import head_of
from zero_runtime.same_host.sizes import terms_bytes
from zero_runtime.wire import Wire

RANKS = 4
SLICES, PARTS, MANY_PARTS = Parallel(tp=2), Parallel(sp=2), Parallel(sp=4)


class Bytes(NamedTuple):
    """Of one rank: states between two steps, the most in a step, and data sent in a step."""

    between: int
    peak: int
    sent: int


def divided(
    stage: int,
    model: str = "llama",
    precision: str = "fp32",
    accumulation: int = 1,
    recompute: str = "none",
    parallel: Parallel = SLICES,
    loss: str = "full",
) -> RunConfig:
    case = Case(model, RANKS, stage, precision, accumulation, recompute, 2, loss, "none", 1, 0)
    config = replace(config_of(case), parallel=parallel)
    return replace(config, batch=replace(config.batch, global_size=2 * accumulation * RANKS // parallel.group))


STAGES = [divided(stage) for stage in range(4)]
OTHERS = [
    divided(1, "gpt2", "bf16", 2),
    divided(2, "llama", "bf16 in fp32", 2, "full"),
    divided(3, "gpt_neox", "fp32", 1, "by_operation"),
    divided(3, "llama", "bf16", 1, "every_nth"),
    divided(0, "gpt2", "fp32", 2, "full"),
    replace(divided(3), zero=Zero(stage=3, unit_numel=40_000)),  # several units in a block
    divided(1, "llama", "fp32", 1, loss="tiled"),
    *(replace(divided(stage), optimizer=Optimizer(rule=MuonConfig(ns_dtype="fp32"))) for stage in (0, 2)),
    replace(divided(3, "llama", "fp32", 2), adapter=Adapter(AdapterKind.lora, rank=4)),
    replace(divided(1, "gpt2", "bf16", 1, "full"), adapter=Adapter(AdapterKind.lora, rank=4)),
    replace(divided(3, "llama", "bf16", 2), zero=Zero(stage=3, wire=Wire("int8", "int8"))),
]
QUARTERS = [
    divided(1, "gpt2", parallel=Parallel(tp=4)),
    divided(1, "llama", recompute="full", parallel=Parallel(tp=4), loss="tiled"),
    divided(1, "gpt2", recompute="by_operation", parallel=Parallel(tp=4)),
    divided(1, "gpt_neox", recompute="full", parallel=Parallel(tp=4)),
]
PART_STAGES = [divided(stage, parallel=PARTS) for stage in range(4)]
PART_OTHERS = [
    divided(1, "gpt2", "bf16", 2, parallel=PARTS),
    divided(2, "llama", "bf16 in fp32", 2, "full", PARTS),
    divided(3, "gpt_neox", "fp32", 1, "by_operation", PARTS),
    divided(3, "llama", "bf16", 1, "every_nth", MANY_PARTS),
    divided(0, "gpt2", "fp32", 2, "full", MANY_PARTS),
    divided(2, "llama", "fp32", 1, "none", PARTS, "tiled"),
]


T5 = {"vocab_size": 512, "d_model": 128, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
BERT = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
VIT = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "image_size": 64, "patch_size": 8}
ENCODER = {"intermediate_size": 256}
KINDS = {"t5": T5, "bert": BERT | ENCODER | {"max_position_embeddings": 64}, "vit": VIT | ENCODER}


def of_kind(name: str, *settings: Any, pairs: bool = False, **more: Any) -> RunConfig:
    """A point of one of KINDS. settings, more: see `divided`. pairs: its samples are those of data=pairs."""
    config = divided(*settings, parallel=Parallel(), **more)
    data = Data(DataKind.pairs, path="pairs.json") if pairs else Data(DataKind.synthetic)
    return replace(config, model=Model(name, name, KINDS[name]), data=data)


OF_KINDS = [of_kind("t5", 3)]
OTHERS_OF_KINDS = [
    of_kind("vit", 2),
    of_kind("bert", 1),
    of_kind("t5", 1, precision="bf16", accumulation=2, recompute="full", pairs=True),
    of_kind("t5", 2, loss="tiled", recompute="by_operation"),
    of_kind("bert", 3, precision="bf16", recompute="by_operation", loss="tiled"),
    of_kind("bert", 0, precision="bf16 in fp32", accumulation=2, recompute="full"),
    of_kind("vit", 3, precision="bf16", recompute="full"),
    of_kind("vit", 0, accumulation=2, recompute="every_nth"),
]


def measured(configs: list[RunConfig]) -> list[Bytes]:
    gc.disable()  # a collection frees cycles at times that depend on what else has run
    return [_measured(config) for config in configs]


def _measured(config: RunConfig) -> Bytes:
    runtime = build_runtime(config, torch.device("cpu"), None).runtime  # type: ignore[arg-type]
    inputs, labels = zeros(sample_of(config), config.batch.micro)
    head = head_of(runtime.model)
    assert (head is not None) == (config.parallel.tp > 1)

    def step() -> None:
        tokens = runtime.sum_over_ranks(labels.numel())
        for _ in range(config.batch.accumulation or 1):
            loss = token_losses(runtime.model, inputs, labels, config.loss.tile_tokens, head, runtime.sequence) / tokens
            runtime.backward(loss)
            del loss
        runtime.step(1e-3)

    for _ in range(WARM_UP):
        step()
    census = take_census(runtime)
    runtime.reset_ledger()
    highest, _ = allocated(step)
    sent = sum(volume.bytes for volume in runtime.reset_ledger().data.values())
    runtime.close()
    return Bytes(census.states, census.states + highest, sent)


def predicted(config: RunConfig, known: dict[str, Any]) -> Bytes:
    """known: the answers so far, to which those that are missing are added; stages share them."""
    if activations_key(config) not in known:
        known |= answers([config])
    if units_key(config) not in known:
        known[units_key(config)] = units_of(config)
    memory = Memories(known).of(config)
    assert memory is not None
    peak = memory.peak(config.batch.micro)
    assert peak is not None
    existing = peak.inputs + peak.buffers  # before the step
    return Bytes(memory.parts[0].peaks.between_steps, peak.total - existing, memory.sent_bytes())


def late_terms(config: RunConfig, known: dict[str, Any]) -> int:
    """The most bytes of the terms of one sum: those of the largest unit's shard, in fp32."""
    largest = max(sum(math.prod(shape) for _, shape in unit["shapes"]) for unit in known[units_key(config)]["units"])
    return terms_bytes(4 * -(-largest * config.parallel.group // RANKS))


def check(configs: list[RunConfig]) -> None:
    known: dict[str, Any] = {}
    expected = [predicted(config, known) for config in configs]
    for by_config in run_ranks(measured, RANKS, configs):
        for found, wanted, config in zip(by_config, expected, configs, strict=True):
            what = f"stage {config.zero.stage}, {config.model.name}, {config.recompute.kind}"
            assert found.between == wanted.between, what
            # Several units of a block are gathered more often than the closed form counts, with slices and without.
            assert found.sent == wanted.sent or config.zero.unit_numel is not None, what
            # A rank that reads the others' memory may sum a unit's gradients during any of its waits: when that is
            # depends on which rank comes first, and the terms of the sum then come to other tensors than predicted.
            beyond = found.peak - late_terms(config, known) - wanted.peak
            assert beyond <= ALLOWED_WORST * found.peak, f"{what}: {wanted.peak} and {found.peak}"
            assert wanted.peak - found.peak <= ALLOWED_WORST * found.peak, f"{what}: {wanted.peak} and {found.peak}"


def test_states_peaks_and_messages_of_every_stage_are_the_predicted_ones() -> None:
    check(STAGES)


@pytest.mark.parametrize("configs", [OF_KINDS, pytest.param(OTHERS_OF_KINDS, marks=pytest.mark.full)])
def test_states_peaks_and_messages_of_other_kinds_of_models_are_the_predicted_ones(configs: list[RunConfig]) -> None:
    check(configs)


@pytest.mark.full
@pytest.mark.parametrize("configs", [OTHERS, QUARTERS], ids=["two slices", "four slices"])
def test_states_peaks_and_messages_with_other_settings_are_the_predicted_ones(configs: list[RunConfig]) -> None:
    check(configs)


@pytest.mark.full
def test_parts_of_sequences_have_the_predicted_states_peaks_and_messages_at_every_stage() -> None:
    check(PART_STAGES)


@pytest.mark.full
def test_parts_of_sequences_have_the_predicted_states_peaks_and_messages_with_other_settings() -> None:
    check(PART_OTHERS)
