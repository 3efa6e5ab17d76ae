"""Ranks of a sequence-parallel group: one that dies is named by all others."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.divided import batch_of, loss_sum, model_of
from harness.outcomes import assert_death_is_named, rank_outcomes
from harness.ranks import run_ranks

from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.parallel.sequence.division import SequenceParallel
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch

CPU = torch.device("cpu")
KILLED, KILLED_AT, LIMIT_S = 2, 3, 60.0


class DyingForward:
    """A block's forward, before whose call number `KILLED_AT` the rank `KILLED` dies."""

    def __init__(self, forward: Any) -> None:
        self._forward, self._count = forward, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._count += 1
        if dist.get_rank() == KILLED and self._count == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._forward(*args, **kwargs)


def left_after_closing() -> set[str]:
    """Which methods the model still has on the instance."""
    model = model_of("llama")
    settings = RuntimeSettings(sequence_parallel=SequenceParallel(2))
    runtime = ZeroRuntime(model, ZeroPlan.from_stage(3), MixedPrecision(), AdamWConfig(), settings, CPU)
    runtime.close()
    return vars(model).keys() & {"forward", "generate"}


def test_a_closed_runtime_leaves_the_models_own_forward_and_generate() -> None:
    assert run_ranks(left_after_closing, 2) == [set()] * 2


def train_until_killed(watch: RankWatch, stage: int) -> None:
    model = model_of("llama")
    block = model.model.layers[1]
    block.forward = DyingForward(block.forward)
    settings = RuntimeSettings(watch=watch, sequence_parallel=SequenceParallel(2))
    runtime = ZeroRuntime(model, ZeroPlan.from_stage(stage), MixedPrecision(), AdamWConfig(), settings, CPU)
    for step in range(2 * KILLED_AT):
        ids = batch_of(model, step, runtime.collectives.batch_rank)
        runtime.backward(loss_sum(model, ids, None, runtime.sequence))
        runtime.step(1e-3)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_rank_that_dies_in_a_group_is_named_by_all_others(stage: int) -> None:
    """Its group waits in an exchange of parts, the other group in a collective of all ranks."""
    outcomes = rank_outcomes(partial(train_until_killed, stage=stage), 4, limit_s=LIMIT_S)
    assert_death_is_named(outcomes, KILLED, f"step {KILLED_AT}, forward")
