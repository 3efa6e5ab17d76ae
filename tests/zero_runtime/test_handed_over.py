"""The runtime handles models whose values differ between ranks, autocast, a non-finite buffer and a refused start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.oracle import ADAMW
from harness.plain_optimizers import plain_optimizer
from harness.ranks import run_ranks
from torch import nn

from zero_runtime.errors import NonFiniteError, PlanError
from zero_runtime.optim.configs import OptimizerConfig, TorchConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

STAGES = (0, 1, 2, 3)
WIDTH = 6


class Scaled(nn.Module):
    """Two linear layers with a buffer between them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.register_buffer("scale", torch.rand(WIDTH))
            self.register_buffer("mask", torch.rand(WIDTH) > 0.5)
            self.register_buffer("turned", torch.rand(2, WIDTH).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x)) * self.scale * self.mask + self.turned.sum(1)
        return self.layers[1](x).float().square().sum()


def make(model: nn.Module, stage: int, optimizer: OptimizerConfig = ADAMW) -> ZeroRuntime:
    plan = ZeroPlan.from_stage(stage)
    return ZeroRuntime(model, plan, MixedPrecision(), optimizer, RuntimeSettings(), torch.device("cpu"))


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _losses(seeds: tuple[int, int], autocast: bool) -> dict[int, list[float]]:
    found = {}
    for stage in STAGES:
        runtime = make(Scaled(seeds[dist.get_rank()]), stage)
        found[stage] = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = runtime(inputs(step, dist.get_rank()))
            runtime.backward(loss)
            found[stage].append(runtime.step(1e-2).loss)
    return found


def plain(autocast: bool) -> list[float]:
    model = Scaled()
    optimizer = plain_optimizer(ADAMW, dict(model.named_parameters()), 1e-2)
    found = []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = [model(inputs(step, rank)) for rank in (0, 1)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(float(loss.detach()) for loss in losses))
    return found


def test_ranks_with_different_seeds_all_train_the_model_of_rank_0() -> None:
    for by_stage in run_ranks(_losses, 2, (0, 7), False):
        for stage in STAGES:
            assert by_stage[stage] == plain(autocast=False), f"stage {stage}"


def test_a_forward_under_autocast_has_the_bits_of_plain_torch_under_autocast() -> None:
    for by_stage in run_ranks(_losses, 2, (0, 0), True):
        for stage in STAGES:
            assert by_stage[stage] == plain(autocast=True), f"stage {stage}"


def _bad_buffer() -> str:
    runtime = make(Scaled(), 3)
    runtime.model.scale[2] = float("nan") if dist.get_rank() == 1 else 1.0

    def backwards() -> None:
        runtime.backward(runtime(inputs(0, dist.get_rank())))

    backwards()
    with pytest.raises(NonFiniteError):
        runtime.step(1e-2)
    return runtime.find_non_finite(backwards)


def test_a_non_finite_buffer_on_one_rank_is_traced_to_that_rank() -> None:
    for verdict in run_ranks(_bad_buffer, 2):
        assert "rank 1" in verdict
        assert "rank 0" not in verdict


def _second_start() -> list[Any]:
    """A start that is refused after the units were built, then a successful one with the same model."""
    model = Scaled()
    with pytest.raises(PlanError):
        make(model, 3, TorchConfig("AdamW", {"no_such_argument": 1}))
    runtime = make(model, 3)
    runtime.backward(runtime(inputs(0, dist.get_rank())))
    return [runtime.step(1e-2).loss]


def test_a_model_can_be_used_again_after_the_runtime_refused_to_start() -> None:
    for losses in run_ranks(_second_start, 2):
        assert losses == plain(autocast=False)[:1]
