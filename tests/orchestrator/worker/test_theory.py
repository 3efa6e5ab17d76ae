"""The elements that a run's summary names as theory are those that the ledger counts, with frozen parameters too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from points import LLAMA, config_of

from orchestrator.config.optimizer import Optimizer
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Adapter, AdapterKind, Loss, LossKind, ResolvedBatch, RunConfig
from orchestrator.config.state_groups import Precision, Zero
from orchestrator.report.summary import communication_rows
from orchestrator.worker.setup import build_runtime
from orchestrator.workloads.models import token_losses
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.optim.configs import MuonConfig
from zero_runtime.parallel.tensor.division import head_of
from zero_runtime.precision import MixedPrecision
from zero_runtime.wire import Wire

LORA = Adapter(AdapterKind.lora, rank=4)
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
WORLD, SEQ, MICROS = 2, 16, 2


def configured(zero: Zero, adapter: Adapter) -> RunConfig:
    config = replace(config_of(4, every=None, ranks=WORLD), zero=zero, adapter=adapter)
    return replace(config, batch=ResolvedBatch(micro=1, accumulation=MICROS, global_size=MICROS * WORLD, seq=SEQ))


def divided(
    stage: int, adapter: Adapter, recompute: str = "none", model_type: str = "llama", tile: int | None = None
) -> RunConfig:
    """With two slices of each layer on the two ranks."""
    config = replace(configured(Zero(stage=stage), adapter), parallel=Parallel(tp=WORLD))
    loss = Loss() if tile is None else Loss(LossKind.tiled, tile)
    sizes = config.model.config if model_type == "llama" else NEOX
    model = replace(config.model, model_type=model_type, config=sizes)
    return replace(config, model=model, loss=loss, recompute=RecomputeRule(recompute))  # type: ignore[arg-type]


def sent(configs: list[RunConfig]) -> list[tuple[dict[str, Any], int, int]]:
    """By configuration: the communication of its second step, and the frozen elements that a backward reads, and that
    it does not, with padding."""
    return [_sent(config) for config in configs]


def _sent(config: RunConfig) -> tuple[dict[str, Any], int, int]:
    built = build_runtime(config, torch.device("cpu"), None)  # type: ignore[arg-type]
    runtime = built.runtime
    ids = torch.zeros((1, SEQ), dtype=torch.int64)
    for _ in range(2):
        runtime.reset_ledger()
        for _ in range(MICROS):
            runtime.backward(token_losses(runtime.model, ids, ids, config.loss.tile_tokens, head_of(runtime.model)))
        runtime.step(1e-3)
    found = built.accounts.communication(runtime.reset_ledger())
    frozen = {unit.name: unit.layout.padded_numel for unit in runtime.units if not unit.trainable}
    embedding = sum(numel for name, numel in frozen.items() if "embed_tokens" in name)
    runtime.close()
    return found, sum(frozen.values()) - embedding, embedding


MUON = Optimizer(rule=MuonConfig(ns_dtype="fp32"))
CODED = Precision(MixedPrecision(weights="int4"), compute="fp32")
SHORT = [
    configured(Zero(stage=3), LORA),
    replace(configured(Zero(stage=3), LORA), precision=CODED),
    divided(3, LORA),
    replace(divided(0, Adapter()), optimizer=MUON),
]
CONFIGS = [
    *SHORT,
    *(configured(Zero(stage=stage), adapter) for stage in (1, 2, 3) for adapter in (Adapter(), LORA)),
    configured(Zero(stage=3, wire=Wire(gather="int8")), LORA),
    configured(Zero(stage=3, shard_ranks=1), LORA),
    divided(1, Adapter(), tile=7),
    divided(1, LORA, "full"),
    divided(0, LORA, "none", "gpt_neox"),
    replace(divided(3, Adapter()), optimizer=MUON),
]


@pytest.mark.parametrize("configs", [SHORT, pytest.param(CONFIGS, marks=pytest.mark.full)], ids=len)
def test_counted_elements_are_the_theory_with_and_without_adapters(configs: list[RunConfig]) -> None:
    for config, (found, _, _) in zip(configs, run_ranks(sent, WORLD, configs)[0], strict=True):
        (row,) = (row for row in communication_rows({"communication": found}) if row.name == "  and in theory")
        assert row.text.endswith(": equal"), (config.zero, config.adapter.kind, row.text)
        assert found["theory_elements"] > 0


def test_frozen_parameters_are_gathered_twice_and_an_embedding_before_all_trained_ones_once() -> None:
    ((found, read, embedding),) = run_ranks(sent, WORLD, SHORT[:1])[0]
    (trained,) = (volume["elements"] for kind, volume in found["data"].items() if kind == "reduce_scatter")
    gathered = found["data"]["all_gather"]["elements"] - 2 * trained  # two gathers and a reduction of the trained ones
    assert read > 0
    assert embedding > 0
    assert gathered == MICROS * (2 * read + embedding) // WORLD
    assert found["theory"] == (
        f"{3 * MICROS}Ψ·(N-1)/N + {2 * MICROS}Φ·(N-1)/N (Φ frozen; of {embedding:,} half, which backward does not read)"
    )
