"""Every collective of the backend shm gives the bits of a plain computation in rank order, and the runtime's own those
of messages over gloo: for 1 to 4 ranks, every dtype, empty to large, contiguous or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness.ranks import run_ranks

from zero_runtime.gloo import Messages, messages_over
from zero_runtime.same_host.group import SharedGroup, register

# torch 2.13 renamed these two; 2.12 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ADDED = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64, torch.complex128, torch.int64),
    *(torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
COPIED = (*ADDED, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
# Around the borders in operations.py: 2**14 bytes are summed at once, 2**19 at a time. In bytes: 2 MiB and 3 elements.
SMALL_NUMELS, MIB = (0, 1, 2**14 - 1, 2**14, 2**14 + 1), 2**20
WIDE = (torch.float32, torch.bfloat16, torch.uint8)  # of every size in the short form


@lru_cache(maxsize=64)
def _drawn(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (numel,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(numel, generator=generator, dtype=kind).to(dtype)
    return torch.randint(100, (numel,), generator=generator).to(dtype)


class Case(NamedTuple):
    """dtype and numel: of one rank's part. dense: contiguous. rank, world: of this process in its group."""

    dtype: torch.dtype
    numel: int
    dense: bool
    rank: int
    world: int

    def part(self, rank: int, to: int = 0, numel: int | None = None) -> torch.Tensor:
        """What a rank has for a rank: 1-D, the same on every process. Must not be written to."""
        return _drawn(self.dtype, self.numel if numel is None else numel, 100 * rank + to)

    def laid(self, values: torch.Tensor) -> torch.Tensor:
        """The values in memory of the case's kind."""
        if self.dense:
            return values.clone()
        laid = torch.zeros(values.numel(), 3, dtype=values.dtype)[:, 1]
        return laid.copy_(values)

    def own(self, to: int = 0) -> torch.Tensor:
        return self.laid(self.part(self.rank, to))

    def empty(self, parts: int = 1) -> torch.Tensor:
        return self.laid(torch.zeros(self.numel * parts, dtype=self.dtype))

    def parts(self, to: int = 0) -> list[torch.Tensor]:
        return [self.part(rank, to) for rank in range(self.world)]

    def total(self, to: int = 0, add: Callable[..., torch.Tensor] = torch.add) -> torch.Tensor:
        total, *terms = self.parts(to)
        for term in terms:
            total = add(total, term)
        return total


Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]  # what a collective gave, and what is right


def gathers(case: Case) -> Pairs:
    root = case.world - 1
    listed = [case.empty() for _ in range(case.world)]
    dist.all_gather(listed, case.own())
    yield from zip(listed, case.parts(), strict=True)
    whole = case.empty(case.world)
    all_gather_single(whole, case.own())
    yield whole, torch.cat(case.parts())
    own, *_ = whole[case.rank * case.numel :].split(max(1, case.numel))  # its own slice of the output
    whole.copy_(torch.cat([case.part(case.rank)] * case.world))
    all_gather_single(whole, own)
    yield whole, torch.cat(case.parts())
    wholes = [case.empty(case.world), case.empty(case.world)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as both:
        for to, one in enumerate(wholes):
            all_gather_single(one, case.own(to))
    both.wait()
    yield from ((one, torch.cat(case.parts(to))) for to, one in enumerate(wholes))
    at_root = [case.empty() for _ in range(case.world)] if case.rank == root else None
    dist.gather(case.own(), at_root, dst=root)
    yield from zip(at_root or [], case.parts() if at_root else [], strict=True)


def copies(case: Case) -> Pairs:
    root = case.world - 1
    sent = case.own()
    dist.broadcast(sent, src=root)
    yield sent, case.part(root)
    received = case.empty()
    dist.scatter(received, [case.own(to) for to in range(case.world)] if case.rank == root else None, src=root)
    yield received, case.part(root, case.rank)
    listed = [case.empty() for _ in range(case.world)]
    dist.all_to_all(listed, [case.own(to) for to in range(case.world)])
    yield from zip(listed, case.parts(case.rank), strict=True)
    whole = case.empty(case.world)
    dist.all_to_all_single(whole, case.laid(torch.cat([case.own(to) for to in range(case.world)])))
    yield whole, torch.cat(case.parts(case.rank))
    # Unequal parts: rank r has numel + r + to elements for rank `to`, and rank 0 none for rank 0.
    sizes = [[(case.numel + rank + to) * (rank + to > 0) for to in range(case.world)] for rank in range(case.world)]
    into = [sizes[rank][case.rank] for rank in range(case.world)]
    given = [case.part(case.rank, to, sizes[case.rank][to]) for to in range(case.world)]
    unequal = case.laid(torch.zeros(sum(into), dtype=case.dtype))
    dist.all_to_all_single(unequal, case.laid(torch.cat(given)), into, sizes[case.rank])
    yield unequal, torch.cat([case.part(rank, case.rank, numel) for rank, numel in enumerate(into)])


def messages(case: Case) -> Pairs:
    if case.world == 1:
        return
    after, before = (case.rank + 1) % case.world, (case.rank - 1) % case.world
    received = case.empty()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, received, before), dist.P2POp(dist.isend, case.own(), after)]
    )
    for work in works:
        work.wait()
    yield received, case.part(before)
    if case.rank == 0:
        for _ in range(case.world - 1):
            received = case.empty()
            source = dist.recv(received, tag=3)
            yield received, case.part(source)
        return
    dist.send(case.own(), 0, tag=3)


def sums(case: Case) -> Pairs:
    root = case.world - 1
    reduced = case.own()
    dist.all_reduce(reduced)
    yield reduced, case.total()
    several = [case.own(to) for to in range(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as all_three:
        for one in several:
            dist.all_reduce(one)
    all_three.wait()
    yield from ((one, case.total(to)) for to, one in enumerate(several))
    at_root = case.own()
    dist.reduce(at_root, dst=root)
    yield at_root, case.total() if case.rank == root else case.part(case.rank)
    scattered = case.empty()
    dist.reduce_scatter(scattered, [case.own(to) for to in range(case.world)])
    yield scattered, case.total(case.rank)
    whole = case.laid(torch.cat([case.part(case.rank, to) for to in range(case.world)]))
    reduce_scatter_single(scattered, whole)
    yield scattered, case.total(case.rank)
    pairs = [(case.empty(), case.laid(whole)) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as both:
        for one, given in pairs:
            reduce_scatter_single(one, given)
    both.wait()
    yield from ((one, case.total(case.rank)) for one, _ in pairs)


def functional_forms(case: Case) -> Pairs:
    everyone = dist.group.WORLD
    whole = torch.cat([case.part(case.rank, to) for to in range(case.world)])
    yield functional.all_gather_tensor(case.own(), 0, everyone), torch.cat(case.parts())
    yield functional.all_reduce(case.own(), "sum", everyone), case.total()
    yield functional.reduce_scatter_tensor(whole, "sum", 0, everyone), case.total(case.rank)
    yield functional.broadcast(case.own(), 0, everyone), case.part(0)
    several = functional.all_reduce_coalesced([case.own(), case.own(1)], "sum", everyone)
    yield from zip(several, [case.total(), case.total(1)], strict=True)
    sizes = [case.numel] * case.world
    yield functional.all_to_all_single(whole, sizes, sizes, everyone), torch.cat(case.parts(case.rank))


def same(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit are equal."""
    if (found.shape, found.dtype) != (right.shape, right.dtype):
        return False
    # One element with a stride of 3 counts as contiguous, but has no view as bytes.
    bits = [torch.empty(one.shape, dtype=one.dtype).copy_(one).view(torch.uint8) for one in (found, right)]
    return bool(torch.equal(*bits))


def cases(dtypes: tuple[torch.dtype, ...], is_full: bool) -> Iterator[Case]:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in dtypes:
        every = (*SMALL_NUMELS, 2 * MIB // dtype.itemsize + 3)
        for numel in every if is_full or dtype in WIDE else every[:-1:2]:
            for dense in (True, False):
                yield Case(dtype, numel, dense, rank, world)


def _wrong(is_full: bool) -> list[str]:
    """The collectives of this rank whose bits are wrong."""
    assert isinstance(dist.group.WORLD, SharedGroup) or dist.get_world_size() == 1
    if dist.get_world_size() == 1:  # the world of one is gloo's
        register()
        _within(dist.new_group([0], backend="shm"))
    wrong = []
    for kinds, dtypes in (((gathers, copies, messages), COPIED), ((sums, functional_forms), ADDED)):
        for case in cases(dtypes, is_full):
            for kind in kinds:
                wrong += [
                    f"{kind.__name__} number {number} of {case}"
                    for number, pair in enumerate(kind(case))
                    if not same(*pair)
                ]
    return wrong


def _within(group: Any) -> None:
    dist.distributed_c10d._update_default_pg(group)


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_every_collective_gives_the_bits_of_a_computation_in_rank_order(world: int) -> None:
    assert run_ranks(_wrong, world, world == 4) == [[]] * world


_OPERATIONS = {
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _other_sums() -> list[str]:
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    for numel in (7, 2**14 + 1):
        for op, add in _OPERATIONS.items():
            case = Case(torch.int64, numel, True, rank, world)
            found = case.own()
            dist.all_reduce(found, op)
            wrong += [] if same(found, case.total(add=add)) else [f"{op} of {numel}"]
        for dtype in (torch.float32, torch.bfloat16):
            case = Case(dtype, numel, True, rank, world)
            found, scattered, at_root = case.own(), case.empty(), case.own()
            dist.all_reduce(found, dist.ReduceOp.AVG)
            dist.reduce_scatter(scattered, [case.own(to) for to in range(world)], dist.ReduceOp.AVG)
            dist.reduce(at_root, 0, dist.ReduceOp.AVG)
            pairs = [(found, case.total()), (scattered, case.total(rank)), *([(at_root, case.total())] * (rank == 0))]
            wrong += [f"AVG of {case}" for one, total in pairs if not same(one, total / world)]
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "bytes": b"x" * 10**5})
    told: list[Any] = [("of", rank)]
    dist.broadcast_object_list(told, src=world - 1)
    given: list[Any] = [None]
    dist.scatter_object_list(given, list(range(world)) if rank == 0 else None, src=0)
    at_root_too: list[Any] = [None] * world
    dist.gather_object(rank, at_root_too if rank == 0 else None, dst=0)
    dist.barrier()
    if [one["rank"] for one in objects] != list(range(world)) or told != [("of", world - 1)] or given != [rank]:
        wrong.append(f"objects: {[one['rank'] for one in objects]}, {told}, {given}")
    return wrong if rank or at_root_too == list(range(world)) else [*wrong, f"gathered objects: {at_root_too}"]


def test_other_sums_and_objects() -> None:
    assert run_ranks(_other_sums, 3) == [[]] * 3


def _as_over_gloo(numels: tuple[int, ...]) -> list[str]:
    """The runtime's own collectives that differ from those over gloo."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    ours, gloos = messages_over(dist.group.WORLD), messages_over(dist.new_group(backend="gloo"))
    assert isinstance(gloos, Messages)
    assert not isinstance(ours, Messages)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for numel in numels:
            case = Case(dtype, numel, True, rank, world)
            full = torch.cat([case.part(rank, to) for to in range(world)])
            results = []
            for through in (ours, gloos):
                gathered, scattered, own = case.empty(world), case.empty(), full.clone()
                into = [case.empty() for _ in range(world)]
                waits = [through.all_gather(gathered, case.own(), 5), through.reduce_scatter(scattered, full.clone())]
                waits.append(through.reduce_scatter(own.chunk(world)[rank], own))  # in place
                waits.append(through.exchange(into, list(full.chunk(world))))
                for wait in reversed(waits):
                    wait()
                others = [one for peer, one in enumerate(into) if peer != rank]
                results.append(torch.cat([gathered, scattered, own.chunk(world)[rank], *others]))
            wrong += [] if same(*results) else [str(case)]
    return wrong


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_the_runtimes_collectives_give_the_bits_of_messages_over_gloo(world: int) -> None:
    assert run_ranks(_as_over_gloo, world, (1, 5, 2**14 + 1, 2**19 + 3)) == [[]] * world
