"""A full step of every stage runs on fake tensors with a fake process group, without memory or other ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from harness.models import TinySpec, TinyTransformer, token_loss_sum
from harness.ranks import run_alone

from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import (
    TORCH_NAMES,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
    TorchConfig,
)
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import CollectiveCounts, collective_elements
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

WORLD = 64
STAGES = (0, 1, 2, 3)
WIDE = TinySpec(vocab=32_000, width=1024, blocks=4)
ONE_BLOCK = TinySpec(blocks=1)


def _finite(numbers: torch.Tensor) -> list[float]:
    """Replaces the one host read of a step, because a fake tensor has no values."""
    return [1.0] * numbers.numel()


def _steps_of_rows(precision: MixedPrecision) -> dict[int, tuple[int, int, int]]:
    """By stage: elements that the second step sent, elements that the theory predicts, host reads of both steps."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=WORLD)
    found = {}
    for stage in STAGES:
        reads = []

        def read(numbers: torch.Tensor, reads: list = reads) -> list[float]:
            reads.append(numbers.numel())
            return _finite(numbers)

        with FakeTensorMode():
            runtime = ZeroRuntime(
                TinyTransformer(WIDE),
                ZeroPlan.from_stage(stage),
                precision,
                AdamWConfig(),
                RuntimeSettings(clip_norm=1.0, read_host=read, loss_scale=LossScaleRule(static=8.0)),
                torch.device("cpu"),
            )
            ids = torch.zeros((2, 16), dtype=torch.int64)
            for _ in range(2):
                runtime.reset_ledger()
                loss = token_loss_sum(runtime.model, ids, ids) / runtime.sum_over_ranks(32)
                runtime.backward(loss)
                runtime.step(1e-3)
            sent = runtime.reset_ledger().data_elements
            padded = sum(unit.layout.padded_numel for unit in runtime.units)
        counts = CollectiveCounts.of(runtime.plan)
        theory = collective_elements(counts, padded, world=WORLD, shard_count=runtime.collectives.shard_count)
        found[stage] = (sent, theory, len(reads))
    return found


@pytest.mark.parametrize("param", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_a_dry_run_step_at_world_64_sends_the_predicted_volume_with_one_host_read(param: str) -> None:
    for sent, theory, reads in run_alone(_steps_of_rows, MixedPrecision(param)).values():
        assert sent == theory
        assert reads == 2  # two steps


DRY: list[OptimizerConfig] = [SgdConfig(momentum=0.9), LionConfig(), LambConfig(), AdamW8bitConfig()]
DRY += [TorchConfig(name) for name in TORCH_NAMES]


def _optimizers_run_dry() -> list[str]:
    """Names of the optimizers that took two steps at stage 3."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=WORLD)
    done = []
    for config in DRY:
        with FakeTensorMode(), pytest.raises(PlanError, match=config.name) if config.reads_on_host else nullcontext():
            runtime = ZeroRuntime(
                TinyTransformer(ONE_BLOCK),
                ZeroPlan.from_stage(3),
                MixedPrecision(),
                config,
                RuntimeSettings(read_host=_finite),
                torch.device("cpu"),
            )
            ids = torch.zeros((2, 16), dtype=torch.int64)
            for _ in range(2):
                runtime.backward(token_loss_sum(runtime.model, ids, ids))
                runtime.step(1e-3)
            done.append(config.name)
    return done


@pytest.mark.full
def test_every_optimizer_can_dry_run_except_asgd_which_reads_on_the_host_and_is_refused() -> None:
    dry = run_alone(_optimizers_run_dry)
    assert {config.name for config in DRY} - set(dry) == {"torch.optim.ASGD"}
