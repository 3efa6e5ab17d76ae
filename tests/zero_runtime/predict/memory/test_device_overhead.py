"""The allowance for memory outside of torch's tensors counts the communicators that a rank really makes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_runtime.predict.memory.device_overhead import CONTEXT, WORKSPACES, DeviceOverhead, communicators
from zero_runtime.world import RankGroups


@pytest.mark.parametrize(
    ("world", "shard_count", "degrees"),
    [
        *((1, 1, (1, 1)), (8, 1, (1, 1)), (8, 8, (1, 1)), (8, 4, (1, 1)), (8, 2, (1, 1)), (2, 2, (1, 1))),
        *((8, 1, (2, 1)), (8, 4, (2, 1)), (8, 2, (2, 1)), (8, 1, (8, 1)), (2, 1, (2, 1))),
        *((8, 1, (1, 2)), (8, 8, (1, 4)), (8, 2, (1, 8)), (2, 2, (1, 2))),
    ],
)
def test_there_is_a_communicator_for_the_world_and_for_each_group(
    world: int, shard_count: int, degrees: tuple[int, int]
) -> None:
    """degrees: of tensor and of sequence parallelism."""
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    try:
        groups = {group for group in RankGroups.make(shard_count, *degrees) if group is not None} | {dist.group.WORLD}
    finally:
        dist.destroy_process_group()
    assert communicators(world, shard_count, *degrees) == (len(groups) if world > 1 else 0)


@pytest.mark.parametrize(("shard_count", "degree", "count"), [(4, 1, 5), (1, 1, 3), (8, 1, 3), (2, 2, 6)])
def test_shard_groups_that_exchange_parameters_have_one_more(shard_count: int, degree: int, count: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    try:
        made = RankGroups.make(shard_count, degree, gathers_across=True)
    finally:
        dist.destroy_process_group()
    assert len([group for group in made if group is not None]) + 1 == count
    assert communicators(8, shard_count, degree, gathers_across=True) == count


def test_a_single_rank_needs_the_context_and_the_workspaces_alone() -> None:
    assert DeviceOverhead.on_cuda(1, 1) == DeviceOverhead(0, CONTEXT[0] + WORKSPACES, CONTEXT[1] + WORKSPACES)
    several = DeviceOverhead.on_cuda(8, 8)
    assert several.least > DeviceOverhead.on_cuda(8, 1).least > CONTEXT[0]
    assert several.least < several.most
