"""On a GPU, every row gives the bits of plain torch on the same GPU (one rank, so no sum over ranks)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.models import TinyTransformer, batch, token_loss_sum
from harness.oracle import ADAMW, LR, Case, step_tokens
from harness.plain_optimizers import plain_optimizer

from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.memory.census import take_census
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

pytestmark = pytest.mark.gpu
STAGES = (0, 1, 2, 3)
STEPS = 5


def plain_losses(case: Case, device: torch.device) -> list[float]:
    model = TinyTransformer(case.model).to(device)
    optimizer = plain_optimizer(ADAMW, dict(model.named_parameters()), LR)
    losses = []
    for step in range(STEPS):
        ids, labels = (part.to(device) for part in batch(case.model, step, 0, 0))
        loss = token_loss_sum(model, ids, labels) / torch.tensor(step_tokens(case, step), device=device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def runtime_losses(case: Case, stage: int, device: torch.device) -> tuple[list[float], bool]:
    runtime = ZeroRuntime(
        TinyTransformer(case.model),
        ZeroPlan.from_stage(stage),
        case.precision,
        ADAMW,
        RuntimeSettings(),
        device,
    )
    losses = []
    for step in range(STEPS):
        ids, labels = (part.to(device) for part in batch(case.model, step, 0, 0))
        loss = token_loss_sum(runtime.model, ids, labels) / runtime.sum_over_ranks(step_tokens(case, step))
        runtime.backward(loss)
        counted = take_census(runtime).states == predicted_state_bytes(runtime).total
        losses.append(runtime.step(LR).loss)
    return losses, counted


@pytest.mark.parametrize("stage", STAGES)
def test_fp32_on_cuda_has_the_bits_of_plain_torch(stage: int, device: torch.device) -> None:
    case = Case(world=1)
    losses, counted = runtime_losses(case, stage, device)
    assert losses == plain_losses(case, device)
    assert counted


def test_bf16_on_cuda_gives_the_same_losses_in_every_row(device: torch.device) -> None:
    case = replace(Case(world=1), precision=MixedPrecision("bf16"))
    first, *others = [runtime_losses(case, stage, device) for stage in STAGES]
    assert all(other == first for other in others)
    assert first[1]
