"""All GPUs of this machine as ranks over NCCL: bits, the end of runtimes, a rank out of memory, memory not of tensors.

The bits are those of exact arithmetic (harness/exact.py), which NCCL's order of a sum cannot change.
"""

from __future__ import annotations

import pytest
import torch
from harness import rank_scenarios
from harness.exact import hybrid_rows, rows_of
from harness.outcomes import HASTY
from harness.rank_scenarios import BAD_RANK
from harness.spawned import spawn_ranks, values_of

from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.memory.device_overhead import CONTEXT, WORKSPACES, DeviceOverhead

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world() -> int:
    """The number of GPUs; without two there is nothing to communicate."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs at least two GPUs, found {count}")
    return count


def test_every_row_over_nccl_has_the_bits_of_plain_torch_in_fp64(world: int) -> None:
    rows = [row for row in rows_of(world) if row.shard_ranks is None]
    assert values_of(spawn_ranks(rank_scenarios.exact_rows, world, rows)) == [[]] * world


def test_hybrid_sharding_over_nccl_has_the_bits_of_plain_torch_in_fp64(world: int) -> None:
    if world < 4:
        pytest.skip(f"needs at least four GPUs, found {world}")
    even = world - world % 2
    assert values_of(spawn_ranks(rank_scenarios.exact_rows, even, hybrid_rows(even))) == [[]] * even


def test_runtimes_end_twice_and_are_followed_by_others_in_one_process(world: int) -> None:
    found = spawn_ranks(rank_scenarios.closed_again_and_again, world, 8, limit_s=120)
    assert values_of(found) == [8] * world


def test_a_rank_out_of_memory_is_named_by_all_and_every_process_ends(world: int) -> None:
    found = spawn_ranks(rank_scenarios.out_of_memory_on_one_rank, world, limit_s=60, watch=HASTY)
    bad = found.pop(BAD_RANK)
    assert (bad.how, bad.kind) == ("raised", "RankMemoryError"), bad
    for other in found:
        assert other.how in ("raised", "ended"), other
        assert other.blamed == (BAD_RANK,), other
        assert "out of memory" in other.text, other


@pytest.mark.parametrize("stage", [0, 3])
def test_cuda_and_nccl_take_what_the_allowance_of_predictions_says(world: int, stage: int) -> None:
    """The workspaces of cuBLAS are in torch's allocator, so they are not part of what is measured here."""
    plan = ZeroPlan.from_stage(stage)
    allowed = DeviceOverhead.on_cuda(world, plan.shard_count(world))
    least, most = allowed.least - WORKSPACES, allowed.most - WORKSPACES
    for rank, (outside, count) in enumerate(values_of(spawn_ranks(rank_scenarios.memory_outside_tensors, world, plan))):
        print(f"rank {rank}: {outside / 2**20:.0f} MiB outside of tensors, {count} communicators, context {CONTEXT}")
        assert least <= outside <= most, (rank, outside, count)
