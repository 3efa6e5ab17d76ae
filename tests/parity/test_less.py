"""What `fit` says of bytes held and sent is what a rank counts, for each setting of docs/less.md."""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from harness.allocations import ProductsWithSums, allocated_peak, products_in_loops
from harness.ranks import COMM, run_ranks
from points import config_of

from orchestrator.config.comm import Comm, CommKind
from orchestrator.config.optimizer import Optimizer
from orchestrator.config.schema import Adapter, AdapterKind, Precision, ResolvedBatch, RunConfig
from orchestrator.config.state_groups import Zero
from orchestrator.wings.predict.activations import answers
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.shapes import units_of
from orchestrator.wings.predict.step import ConfigMemory, Memories
from orchestrator.worker.setup import build_deferred
from orchestrator.workloads.models import token_losses
from zero_runtime.census import take_census
from zero_runtime.optim.configs import AdamWConfig, LionConfig, MuonConfig, OneBitAdamConfig, OptimizerConfig
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import CONVERTED_BYTES, SIGNS_BYTES
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.wire import EXACT, Wire

WORLD, SEQ, STEPS = 2, 16, 4
ADAMW = AdamWConfig(beta2=0.95)


def configured(stage: int, rule: OptimizerConfig, wire: Wire = EXACT, param: str = "bf16") -> RunConfig:
    config = config_of(STEPS, every=None, stage=stage, ranks=WORLD)
    return replace(
        config,
        comm=Comm(CommKind(os.environ.get(COMM, "auto"))),
        batch=ResolvedBatch(micro=2, accumulation=1, global_size=2 * WORLD, seq=SEQ),
        zero=Zero(stage=stage, wire=wire),
        precision=Precision(MixedPrecision(param), compute="fp32"),  # type: ignore[arg-type]  # a word
        optimizer=Optimizer(rule=rule, clip_norm=None),
    )


def coded(stage: int, weights: str, compute: str = "fp32") -> RunConfig:
    """Adapters beside frozen weights in codes."""
    config = configured(stage, ADAMW)
    precision = Precision(MixedPrecision("bf16", weights=weights), compute=compute)  # type: ignore[arg-type]  # words
    adapter = Adapter(AdapterKind.lora, rank=4)
    return replace(config, precision=precision, adapter=adapter)


CONFIGS = {
    "muon": configured(3, MuonConfig(ns_dtype="fp32")),
    "muon, replicated": configured(0, MuonConfig()),
    "bf16 states": configured(2, replace(ADAMW, state_dtype="bf16")),
    "bf16 states of Lion": configured(1, LionConfig(state_dtype="bf16")),
    "quantised": configured(3, ADAMW, Wire("int8", "int4", error_feedback=True)),
    "quantised, full parameters": configured(1, ADAMW, Wire("int8", "int8")),
    "quantised, fp32": configured(3, ADAMW, Wire("int8", "int8"), "fp32"),
    "int4 weights": coded(3, "int4"),
    "int8 weights, full codes": coded(1, "int8"),
    "int4 weights, full codes, computed in bf16": coded(2, "int4", compute="bf16"),
    "the same, products in loops": coded(2, "int4", compute="bf16"),
    "the same, products with buffers": coded(2, "int4", compute="bf16"),
    "1 bit": configured(1, OneBitAdamConfig(warmup_updates=1)),
    "1 bit, replicated": configured(0, OneBitAdamConfig(warmup_updates=1)),
}

OTHER_PROCESSORS = {
    "the same, products in loops": products_in_loops,
    "the same, products with buffers": ProductsWithSums,
}


def _counted(configs: dict[str, RunConfig]) -> dict[str, tuple[int, int, int]]:
    """By name: bytes between two steps, at the peak of a step, and sent in it, on this rank."""
    gc.disable()
    return {name: _of_step(config, OTHER_PROCESSORS.get(name, nullcontext)()) for name, config in configs.items()}


def _of_step(config: RunConfig, processor: AbstractContextManager[object]) -> tuple[int, int, int]:
    model, initialise = build_deferred(config)
    settings = RuntimeSettings(initialise=initialise, wire=config.zero.wire, prefetch=config.zero.prefetch)
    device = torch.device("cpu")
    runtime = ZeroRuntime(model, config.zero.plan, config.precision.mixed, config.optimizer.rule, settings, device)
    ids = torch.zeros((config.batch.micro, SEQ), dtype=torch.int64)

    def step() -> None:
        loss = token_losses(runtime.model, ids, ids, None) / runtime.sum_over_ranks(ids.numel())
        runtime.backward(loss)
        del loss
        runtime.step(1e-3)

    for _ in range(STEPS - 1):
        step()
    between = take_census(runtime).states
    runtime.reset_ledger()
    with processor:
        highest = allocated_peak(step)
    sent = sum(volume.bytes for volume in runtime.reset_ledger().data.values())
    runtime.close()
    return between, between + highest, sent


def predicted(config: RunConfig) -> ConfigMemory:
    memory = Memories(dict(answers([config])) | {units_key(config): units_of(config)}).of(config)
    assert memory is not None
    return memory


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, tuple[int, int, int]]]:
    return run_ranks(_counted, WORLD, CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_between_steps_and_sent_bytes_are_the_predicted_ones(
    name: str, by_rank: list[dict[str, tuple[int, int, int]]]
) -> None:
    memory = predicted(CONFIGS[name])
    for counted in by_rank:
        assert counted[name][0] == memory.parts[0].peaks.between_steps
    assert max(counted[name][2] for counted in by_rank) == memory.sent_bytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_predicted_peak_is_above_the_counted_one_by_no_more_than_a_conversion(
    name: str, by_rank: list[dict[str, tuple[int, int, int]]]
) -> None:
    """Conversions to codes and signs are counted by the most that they can hold at a time. The ids and labels of a step
    exist here before it, and a few scalars are counted that this loss does not make.

    Products in bf16 are this processor's, plain loops, and a stand-in for those that take a buffer. The stand-in has
    the buffer's size with AVX-512 alone, and shows neither the blocks of AVX512-BF16 and AMX nor the values."""
    config, memory = CONFIGS[name], predicted(CONFIGS[name])
    peak = memory.peak(config.batch.micro)
    assert peak is not None
    largest = max(size.padded_numel for size, _ in memory.units)
    converted = largest // WORLD * CONVERTED_BYTES if config.zero.wire != EXACT else 0
    converted += largest * SIGNS_BYTES if config.optimizer.rule.kind == "onebitadam" else 0
    for counted in by_rank:
        assert 0 <= peak.total - counted[name][1] <= peak.inputs + 64 + converted
