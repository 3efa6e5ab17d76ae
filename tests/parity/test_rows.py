"""Every row of the plan's table against plain single-process PyTorch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from harness.models import TinySpec
from harness.oracle import Case, Trace, oracle
from harness.ranks import run_ranks
from harness.trainee import train

from zero_runtime.plan import ZeroPlan

STAGES = (0, 1, 2, 3)
UNIT_ROUNDOFF = 2.0**-24  # fp32, round to nearest


@cache
def ranks_traces(case: Case) -> dict[int, Trace]:
    return run_ranks(train, case.world, case)[0]


@cache
def oracle_trace(case: Case, reduces_every_backward: bool) -> Trace:
    return oracle(case, reduces_every_backward=reduces_every_backward)


def expected(case: Case, stage: int) -> Trace:
    return oracle_trace(case, ZeroPlan.from_stage(stage).reduces_every_backward)


def assert_same_bits(found: Trace, wanted: Trace) -> None:
    assert found.losses == wanted.losses
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), f"{name}: {(found.weights[name] - weight).abs().max()}"


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_has_the_bits_of_plain_torch(stage: int, world: int, tied: bool, micro_batches: int) -> None:
    case = Case(world, micro_batches, model=TinySpec(tied=tied))
    assert_same_bits(ranks_traces(case)[stage], expected(case, stage))
