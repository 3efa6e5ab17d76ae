"""Ranks of a tensor-parallel group: one that dies is named, generation has the plain tokens, and wrong logits are
refused."""

from __future__ import annotations

import copy
import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness.exact import ExactModel, inputs, loss_of
from harness.generation import answer, request_of, small_model
from harness.outcomes import assert_death_is_named, rank_outcomes
from harness.ranks import run_ranks
from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.parallel.tensor.axis import AloneOnAxis, TensorAxis
from zero_runtime.parallel.tensor.cross_entropy import vocabulary_cross_entropy
from zero_runtime.parallel.tensor.division import TensorParallel, head_of
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch

CPU = torch.device("cpu")
KILLED, KILLED_AT, LIMIT_S = 2, 3, 60.0


class Dying(nn.Module):
    """A block before whose forward number `at`, counted from 1, the rank `KILLED` dies."""

    def __init__(self, block: nn.Module, at: int) -> None:
        super().__init__()
        self.block, self.at, self.count = block, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if dist.get_rank() == KILLED and self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.block(x)


def train_until_killed(watch: RankWatch, stage: int) -> None:
    model = ExactModel()
    model.blocks = nn.ModuleList(Dying(block, KILLED_AT if i == 1 else 0) for i, block in enumerate(model.blocks))
    settings = RuntimeSettings(watch=watch, tensor_parallel=TensorParallel(2))
    runtime = ZeroRuntime(model, ZeroPlan.from_stage(stage), MixedPrecision(), AdamWConfig(), settings, CPU)
    for step in range(2 * KILLED_AT):
        runtime.backward(loss_of(model, *inputs(step, runtime.collectives.data_rank, 0)))
        runtime.step(1e-3)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_rank_that_dies_in_a_group_is_named_by_all_others(stage: int) -> None:
    """Its group waits in a sum over the slices, the other group in a collective of the data axis."""
    outcomes = rank_outcomes(partial(train_until_killed, stage=stage), 4, limit_s=LIMIT_S)
    assert_death_is_named(outcomes, KILLED, f"step {KILLED_AT}, forward")


# ---- generation ------------------------------------------------------------------------------------------------------


def generated(architecture: str, number: int, requests: int, *, gathers_logits: bool) -> tuple[int, int]:
    """(requests, those with the plain model's tokens); each group has requests of its own."""
    model = small_model(architecture)
    plain = copy.deepcopy(model)
    settings = RuntimeSettings(tensor_parallel=TensorParallel(2, gathers_logits=gathers_logits))
    runtime = ZeroRuntime(model, ZeroPlan.from_stage(number), MixedPrecision(), None, settings, CPU)
    equal = 0
    for each in range(requests):
        asked = request_of(each, runtime.collectives.data_rank)
        with runtime.uneven_forwards():
            found = answer(model, asked)
        equal += found == answer(plain, asked)
    assert (head_of(model) is None) == gathers_logits, "the head returns again what it did before"
    runtime.close()
    return requests, equal


@pytest.mark.parametrize(
    ("architecture", "stage"),
    [("llama", 3), pytest.param("gpt2", 0, marks=pytest.mark.full), pytest.param("t5", 3, marks=pytest.mark.full)],
)
def test_groups_generate_the_tokens_of_the_plain_model(architecture: str, stage: int) -> None:
    """Also where training needs only a part of the logits on each rank."""
    for requests, equal in run_ranks(partial(generated, gathers_logits=False), 4, architecture, stage, 4):
        assert equal == requests


# ---- logits ----------------------------------------------------------------------------------------------------------


def test_the_loss_of_divided_logits_refuses_others() -> None:
    axis, labels = TensorAxis(AloneOnAxis(2)), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(PlanError, match="expected the 4 rows of 7 logits that this rank holds, found 7"):
        vocabulary_cross_entropy(torch.zeros(3, 7), labels, axis, vocabulary=7)
