"""Each collective delivers the right values, in place and out of place, and the ledger counts (N-1)/N exactly.

The values are small integers, so their sums are exact even in bf16 and do not depend on the order of summation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks

from zero_runtime.collectives import Collectives
from zero_runtime.ledger import Ledger, Volume
from zero_runtime.phase_clock import COMMUNICATION, PhaseClock

SHARD_NUMEL = 12  # divisible by every world size used here, so that the volumes are integers
DTYPES = (torch.float32, torch.bfloat16)


def make(shard_count: int, clock: PhaseClock | None = None) -> Collectives:
    dist.barrier()  # a rank that sends nothing could exit while another still connects to it
    return Collectives(shard_count, clock or PhaseClock(torch.device("cpu")))


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) % 7 + 10 * rank).to(dtype)


def _own_slice(collectives: Collectives, full: torch.Tensor) -> torch.Tensor:
    return full[collectives.shard_rank * SHARD_NUMEL :][:SHARD_NUMEL]


def _gathers(dtype: torch.dtype, in_place: bool) -> tuple[torch.Tensor, Ledger]:
    collectives = make(dist.get_world_size())
    full = torch.full((SHARD_NUMEL * collectives.world,), -1, dtype=dtype)
    shard = _values(collectives.rank, SHARD_NUMEL, dtype)
    if in_place:
        _own_slice(collectives, full).copy_(shard)
        shard = _own_slice(collectives, full)
    pending = collectives.all_gather(full, shard)
    pending.wait()
    pending.wait()
    return full, collectives.ledger.reset()


def _reductions(dtype: torch.dtype, in_place: bool, shard_count: int) -> tuple[torch.Tensor, Ledger]:
    collectives = make(shard_count)
    full = _values(collectives.rank, SHARD_NUMEL * shard_count, dtype)
    shard = _own_slice(collectives, full) if in_place else torch.full((SHARD_NUMEL,), -1, dtype=dtype)
    pending = collectives.reduce(full, shard)
    pending.wait()
    pending.wait()
    return shard, collectives.ledger.reset()


def _all_kinds() -> dict[tuple, Any]:
    """The result and the ledger of this rank, by (kind, dtype, in place)."""
    world = dist.get_world_size()
    found: dict[tuple, Any] = {}
    for dtype in DTYPES:
        for in_place in (False, True):
            found["gather", dtype, in_place] = _gathers(dtype, in_place)
            found["scatter", dtype, in_place] = _reductions(dtype, in_place, world)
            found["replicas", dtype, in_place] = _reductions(dtype, in_place, 1)
    return found


CASES = [(dtype, in_place) for dtype in DTYPES for in_place in (False, True)]


@pytest.fixture(scope="module", params=[2, 3], ids="world_{}".format)
def by_rank(request: pytest.FixtureRequest) -> list[dict[tuple, Any]]:
    return run_ranks(_all_kinds, request.param)


def test_all_gather_concatenates_the_shards_in_rank_order(by_rank: list[dict[tuple, Any]]) -> None:
    for dtype, in_place in CASES:
        wanted = torch.cat([_values(rank, SHARD_NUMEL, dtype) for rank in range(len(by_rank))])
        for found in by_rank:
            assert torch.equal(found["gather", dtype, in_place][0], wanted)


def test_reduce_leaves_each_rank_its_shard_of_the_sum(by_rank: list[dict[tuple, Any]]) -> None:
    world = len(by_rank)
    for dtype, in_place in CASES:
        total = torch.stack([_values(rank, SHARD_NUMEL * world, torch.float32) for rank in range(world)]).sum(0)
        for rank, found in enumerate(by_rank):
            shard = found["scatter", dtype, in_place][0]
            assert shard.dtype == dtype
            assert torch.equal(shard.float(), total[rank * SHARD_NUMEL :][:SHARD_NUMEL])


def test_reduce_over_replicas_leaves_every_rank_the_full_sum(by_rank: list[dict[tuple, Any]]) -> None:
    for dtype, in_place in CASES:
        total = torch.stack([_values(rank, SHARD_NUMEL, torch.float32) for rank in range(len(by_rank))]).sum(0)
        for found in by_rank:
            assert torch.equal(found["replicas", dtype, in_place][0].float(), total)


def test_the_ledger_counts_all_elements_except_the_ranks_own(by_rank: list[dict[tuple, Any]]) -> None:
    world = len(by_rank)
    padded = {"gather": SHARD_NUMEL * world, "scatter": SHARD_NUMEL * world, "replicas": SHARD_NUMEL}
    passes = {"gather": ("all_gather", 1), "scatter": ("reduce_scatter", 1), "replicas": ("all_reduce", 2)}
    for found in by_rank:
        for (kind, dtype, _), (_, ledger) in found.items():
            name, times = passes[kind]
            (volume,) = ledger.data.values()
            assert list(ledger.data) == [name]
            assert volume.calls == 1
            assert volume.elements * world == times * padded[kind] * (world - 1)
            assert volume.bytes == volume.elements * dtype.itemsize
            assert ledger.data_elements == volume.elements
            assert ledger.control == Volume()


def _control() -> tuple[torch.Tensor, Ledger, Ledger, list[Any]]:
    collectives = make(dist.get_world_size())
    total = collectives.sum_over_ranks_(torch.tensor([1.0, 10.0 * collectives.rank, 4.0], dtype=torch.float64))
    objects = collectives.gather_objects({"rank": collectives.rank})
    return total, collectives.ledger.reset(), collectives.ledger, objects


def test_control_messages_are_counted_separately_and_gathered_objects_are_not_counted() -> None:
    for total, ledger, after, objects in run_ranks(_control, 3):
        assert total.tolist() == [3, 30, 12]
        assert ledger.data == {}
        assert ledger.control == Volume(calls=1, elements=4, bytes=32)
        assert (after.data, after.control) == ({}, Volume())
        assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def _alone() -> tuple[list[float], Ledger]:
    collectives = make(1)
    full, shard = torch.arange(3.0), torch.empty(3)
    collectives.reduce(full, shard).wait()
    full.zero_()
    collectives.all_gather(full, shard).wait()
    collectives.sum_over_ranks_(full)
    return full.tolist(), collectives.ledger


def test_a_single_rank_sends_nothing_but_still_copies_the_values() -> None:
    ((values, ledger),) = run_ranks(_alone, 1)
    assert values == [0, 1, 2]
    assert (ledger.data, ledger.control) == ({}, Volume())


def _between() -> str:
    with pytest.raises(AssertionError) as refusal:
        make(2)
    return str(refusal.value)


def test_a_shard_count_that_does_not_divide_the_world_is_refused() -> None:
    assert set(run_ranks(_between, 3)) == {"shard groups of 2 in a world of 3"}


def _waits() -> tuple[float, float]:
    clock = PhaseClock(torch.device("cpu"))
    collectives = make(dist.get_world_size(), clock)
    full = torch.zeros(SHARD_NUMEL * collectives.world)
    clock.start()
    pending = collectives.all_gather(full, _own_slice(collectives, full))
    pending.wait()
    first = clock.end().seconds()[COMMUNICATION]
    clock.start()
    pending.wait()
    return first, clock.end().seconds().get(COMMUNICATION, 0.0)


def test_waiting_twice_is_charged_to_communication_once() -> None:
    for first, second in run_ranks(_waits, 2):
        assert first > 0
        assert second == 0


# ---- the order of sums -----------------------------------------------------------------------------------------------


def _terms(rank: int) -> torch.Tensor:
    """Numbers of very different magnitudes, so that any two orders of summation round differently somewhere."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4 * SHARD_NUMEL, generator=generator) * 10 ** torch.randint(0, 6, (4 * SHARD_NUMEL,))


def _sums() -> dict[tuple[int, bool], torch.Tensor]:
    """This rank's shard of the sum, by (shard count, in place)."""
    world = dist.get_world_size()
    found = {}
    for shard_count in (1, world):
        for in_place in (False, True):
            collectives = make(shard_count)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(dist.get_rank())
                full = _terms(dist.get_rank())[: 4 * SHARD_NUMEL // world * world]
            numel = full.numel() // shard_count
            own = full[collectives.shard_rank * numel :][:numel]
            shard = own if in_place else torch.empty(numel)
            collectives.reduce(full, shard).wait()
            found[shard_count, in_place] = shard.clone()
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gloo_reductions_add_in_rank_order_for_every_shard_count(world: int) -> None:
    """All stages therefore have the same bits at every world size: ((r0 + r1) + r2) + r3 on each rank."""
    terms = []
    for rank in range(world):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank)
            terms.append(_terms(rank))
    wanted = terms[0].clone()
    for term in terms[1:]:
        wanted = wanted + term
    by_rank = run_ranks(_sums, world)
    for in_place in (False, True):
        for found in by_rank:
            assert torch.equal(found[1, in_place], wanted)
        assert torch.equal(torch.cat([found[world, in_place] for found in by_rank]), wanted)
