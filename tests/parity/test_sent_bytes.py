"""The bytes that `fit` says a rank sends in a step are those that its ledger counts, frozen parameters included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.ranks import run_ranks
from points import config_of

from orchestrator.config.schema import Adapter, AdapterKind, ResolvedBatch, RunConfig
from orchestrator.wings.predict.activations import answers
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.shapes import units_of
from orchestrator.wings.predict.step import Memories
from orchestrator.worker.setup import build_deferred
from orchestrator.workloads.models import token_losses
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

LORA = Adapter(AdapterKind.lora, rank=4)
WORLD, SEQ = 2, 16
SMALL = 2500  # elements of a unit: some are single layers, others several that are not called one after another


def configured(
    stage: int, adapter: Adapter, accumulation: int, recompute: str = "none", unit_numel: int | None = None
) -> RunConfig:
    config = config_of(4, every=None, stage=stage, ranks=WORLD)
    config = replace(config, zero=replace(config.zero, unit_numel=unit_numel))
    batch = ResolvedBatch(micro=2, accumulation=accumulation, global_size=2 * WORLD * accumulation, seq=SEQ)
    return replace(config, adapter=adapter, batch=batch, recompute=RecomputeRule(recompute))  # type: ignore[arg-type]


CONFIGS = [
    *(configured(3, LORA, accumulation) for accumulation in (1, 5)),
    configured(3, LORA, 1, "full"),
    configured(1, LORA, 2),
    configured(3, Adapter(), 2),
    *(configured(3, Adapter(), 2, recompute, SMALL) for recompute in ("none", "full")),
    configured(2, Adapter(), 2, unit_numel=SMALL),
]


def counted(configs: list[RunConfig]) -> list[int]:
    """The bytes that this rank sends in the third step of each configuration, without control messages."""
    return [_counted(config) for config in configs]


def _counted(config: RunConfig) -> int:
    model, initialise = build_deferred(config)
    Recomputation(model, config.recompute)
    accumulation = config.batch.accumulation or 1
    settings = RuntimeSettings(
        micro_batches=accumulation,
        prefetch=config.zero.prefetch,
        initialise=initialise,
        unit_numel=config.zero.unit_numel,
    )
    device = torch.device("cpu")
    runtime = ZeroRuntime(model, config.zero.plan, config.precision.mixed, AdamWConfig(), settings, device)
    ids = torch.zeros((config.batch.micro, SEQ), dtype=torch.int64)
    for _ in range(3):
        runtime.reset_ledger()
        for _ in range(accumulation):
            runtime.backward(token_losses(runtime.model, ids, ids, None))
        runtime.step(1e-3)
    return sum(volume.bytes for volume in runtime.reset_ledger().data.values())


def predicted(config: RunConfig) -> int:
    memory = Memories(dict(answers([config])) | {units_key(config): units_of(config)}).of(config)
    assert memory is not None
    return memory.sent_bytes()


@pytest.fixture(scope="module")
def by_rank() -> list[list[int]]:
    return run_ranks(counted, WORLD, CONFIGS)


def test_predicted_sent_bytes_are_those_that_the_ledger_counts(by_rank: list[list[int]]) -> None:
    expected = [predicted(config) for config in CONFIGS]
    assert by_rank == [expected] * WORLD
    assert all(expected)
