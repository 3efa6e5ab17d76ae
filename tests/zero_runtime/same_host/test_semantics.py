"""Each collective over shm means what torch.distributed says: a rank's input is what it was at the call, and outputs
are filled in order. A table of collectives by kinds of memory, with gloo beside it wherever gloo means the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks

from zero_runtime.errors import PeerError
from zero_runtime.same_host.links import Token
from zero_runtime.same_host.mailbox import Place
from zero_runtime.same_host.operations import Call
from zero_runtime.same_host.what import NAMES

# torch 2.13 renamed these two; 2.12 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

N, LARGE = 5, 2**13  # elements of fp32: every rank sums the first itself, and a part of the second
WAIT = timedelta(seconds=60)  # for a key of another rank, which comes at once
Work = Any
Rows = list[torch.Tensor]


class Case(NamedTuple):
    """A call, made anew for each try. issue: with the group and async_op. found, right: its results, and what they must
    be."""

    issue: Callable[[Any, bool], Work]
    found: Rows
    right: Rows


class Memory(NamedTuple):
    """A kind of memory for the tensors of a call. name: of the kind."""

    name: str
    rank: int
    world: int

    def of(self, rank: int, slot: int = 0, numel: int = N) -> torch.Tensor:
        """The values that a rank has for a slot."""
        values = torch.arange(numel, dtype=torch.float32) + 100 * rank + 10 * slot
        return values[:0] if self.name == "empty" else values

    def laid(self, values: torch.Tensor) -> torch.Tensor:
        """The values in memory of this kind."""
        if self.name == "strided":
            return torch.zeros(values.numel(), 3)[:, 1].copy_(values)
        if self.name == "negative":
            return torch._neg_view(-values)
        return values.clone()

    def mine(self) -> Rows:
        """This rank's values for each slot."""
        return [self.laid(self.of(self.rank, slot)) for slot in range(self.world)]

    def empty(self, parts: int = 1) -> torch.Tensor:
        return self.laid(torch.zeros(parts * self.of(0).numel()))

    def empties(self) -> Rows:
        return [self.empty() for _ in range(self.world)]

    def every(self, slot: int = 0) -> Rows:
        """All ranks' values for a slot."""
        return [self.of(rank, slot) for rank in range(self.world)]

    def total(self, slot: int = 0) -> torch.Tensor:
        return torch.stack(self.every(slot)).sum(0)


@contextmanager
def together(group: Any, is_async: bool, works: list[Work]) -> Iterator[None]:
    with dist.distributed_c10d._coalescing_manager(group, async_ops=is_async) as both:
        yield
    works.append(both if is_async else None)


# ---- calls whose tensors are apart -----------------------------------------------------------------------------------


def of_gather(memory: Memory) -> Case:
    own, root, parts = memory.mine()[0], memory.world - 1, memory.empties()
    at_root = parts if memory.rank == root else None
    right = memory.every() if memory.rank == root else []
    return Case(
        lambda group, is_async: dist.gather(own, at_root, dst=root, group=group, async_op=is_async),
        at_root or [],
        right,
    )


def of_scatter(memory: Memory) -> Case:
    root, into = memory.world - 1, memory.empty()
    parts = memory.mine() if memory.rank == root else None
    return Case(
        lambda group, is_async: dist.scatter(into, parts, src=root, group=group, async_op=is_async),
        [into],
        [memory.of(root, memory.rank)],
    )


def of_reduce(memory: Memory) -> Case:
    own, root = memory.mine()[0], memory.world - 1
    found = [own] if memory.rank == root else []  # torch promises nothing of the others'
    return Case(
        lambda group, is_async: dist.reduce(own, root, group=group, async_op=is_async),
        found,
        [memory.total()] if found else [],
    )


def of_messages(memory: Memory) -> Case:
    into, own = memory.empty(), memory.mine()[0]
    after, before = (memory.rank + 1) % memory.world, (memory.rank - 1) % memory.world

    def issue(group: Any, is_async: bool) -> Work:
        works = [dist.irecv(into, before, group=group), dist.isend(own, after, group=group)]
        if is_async:
            return _Several(works)
        for work in works:
            work.wait()
        return None

    return Case(issue, [into], [memory.of(before)])


class _Several(NamedTuple):
    works: list[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def of_coalesced(memory: Memory, kind: str) -> Case:
    wholes, owns = [memory.empty(memory.world) for _ in range(2)], memory.mine()[:2]
    inputs = [
        memory.laid(torch.cat([memory.of(memory.rank, slot + more) for slot in range(memory.world)])) for more in (0, 7)
    ]
    totals = [memory.empty(), memory.empty()]

    def issue(group: Any, is_async: bool) -> Work:
        works: list[Work] = []
        with together(group, is_async, works):
            for number in range(2):
                if kind == "all_reduce":
                    dist.all_reduce(owns[number], group=group)
                elif kind == "all_gather":
                    all_gather_single(wholes[number], owns[number], group=group)
                else:
                    reduce_scatter_single(totals[number], inputs[number], group=group)
        return works[0]

    if kind == "all_reduce":
        return Case(issue, owns, [memory.total(0), memory.total(1)])
    if kind == "all_gather":
        return Case(issue, wholes, [torch.cat(memory.every(slot)) for slot in range(2)])
    return Case(issue, totals, [memory.total(memory.rank), memory.total(memory.rank + 7)])


def plain(memory: Memory) -> dict[str, Case]:
    """Every collective with tensors of one kind of memory."""
    rank, world = memory.rank, memory.world
    parts, whole, total, single = memory.empties(), memory.empty(world), memory.empty(), memory.empty()
    own, mine, all_mine = memory.mine()[0], memory.mine(), memory.laid(torch.cat(memory.mine()))
    reduced, sent, exchanged, exchanged_one = (
        *(memory.mine()[0] for _ in range(2)),
        memory.empties(),
        memory.empty(world),
    )
    large = memory.laid(memory.of(rank, numel=LARGE))
    to_me = [memory.of(peer, rank) for peer in range(world)]
    return {
        "all_reduce": Case(lambda g, a: dist.all_reduce(reduced, group=g, async_op=a), [reduced], [memory.total()]),
        "large all_reduce": Case(
            lambda g, a: dist.all_reduce(large, group=g, async_op=a),
            [large],
            [torch.stack([memory.of(peer, numel=LARGE) for peer in range(world)]).sum(0)],
        ),
        "broadcast": Case(lambda g, a: dist.broadcast(sent, 1, group=g, async_op=a), [sent], [memory.of(1)]),
        "all_gather": Case(lambda g, a: dist.all_gather(parts, own, group=g, async_op=a), parts, memory.every()),
        "all_gather_single": Case(
            lambda g, a: all_gather_single(whole, own, group=g, async_op=a), [whole], [torch.cat(memory.every())]
        ),
        "reduce_scatter": Case(
            lambda g, a: dist.reduce_scatter(total, mine, group=g, async_op=a), [total], [memory.total(rank)]
        ),
        "reduce_scatter_single": Case(
            lambda g, a: reduce_scatter_single(single, all_mine, group=g, async_op=a), [single], [memory.total(rank)]
        ),
        "all_to_all": Case(lambda g, a: dist.all_to_all(exchanged, mine, group=g, async_op=a), exchanged, to_me),
        "all_to_all_single": Case(
            lambda g, a: dist.all_to_all_single(exchanged_one, all_mine, group=g, async_op=a),
            [exchanged_one],
            [torch.cat(to_me)],
        ),
        "reduce": of_reduce(memory),
        "gather": of_gather(memory),
        "scatter": of_scatter(memory),
        "messages": of_messages(memory),
        **{f"coalesced {kind}": of_coalesced(memory, kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")},
        "barrier": Case(lambda g, a: dist.barrier(group=g, async_op=a), [], []),
    }


def shared(memory: Memory) -> dict[str, Case]:
    """Collectives whose inputs or outputs share bytes."""
    rank, world = memory.rank, memory.world
    x = torch.zeros(world * N)
    x[:N] = memory.of(rank)
    firsts, same = [memory.of(rank), *memory.empties()[1:]], memory.empty()
    whole, wholes = torch.cat(memory.mine()), torch.cat(memory.mine())
    added, lists, into_lists = memory.of(rank), memory.mine(), memory.empty()
    to_me = [memory.of(peer, rank) for peer in range(world)]
    scattered, gathered = [memory.of(0, slot) for slot in range(world)], memory.empties()
    gathered[1 if rank == 0 else 0].copy_(memory.of(rank))

    return {
        "all_gather_single(x, x[:n])": Case(
            lambda g, a: all_gather_single(x, x[:N], group=g, async_op=a), [x], [torch.cat(memory.every())]
        ),
        "all_gather(xs, xs[0])": Case(
            lambda g, a: dist.all_gather(firsts, firsts[0], group=g, async_op=a), firsts, memory.every()
        ),
        "all_gather([t] * w, x)": Case(
            lambda g, a: dist.all_gather([same] * world, memory.of(rank), group=g, async_op=a),
            [same],
            memory.every()[-1:],
        ),
        "reduce_scatter_single(x[:n], x)": Case(
            lambda g, a: reduce_scatter_single(whole[:N], whole, group=g, async_op=a), [whole[:N]], [memory.total(rank)]
        ),
        "reduce_scatter(t, [t] * w)": Case(
            lambda g, a: dist.reduce_scatter(added, [added] * world, group=g, async_op=a), [added], [memory.total()]
        ),
        "all_to_all(xs, xs)": Case(lambda g, a: dist.all_to_all(lists, lists, group=g, async_op=a), lists, to_me),
        "all_to_all([t] * w, xs)": Case(
            lambda g, a: dist.all_to_all([into_lists] * world, memory.mine(), group=g, async_op=a),
            [into_lists],
            to_me[-1:],
        ),
        "all_to_all_single(x, x)": Case(
            lambda g, a: dist.all_to_all_single(wholes, wholes, group=g, async_op=a), [wholes], [torch.cat(to_me)]
        ),
        "scatter(parts[1], parts)": Case(
            lambda g, a: dist.scatter(scattered[1], scattered if rank == 0 else None, src=0, group=g, async_op=a),
            [scattered[1]],
            [memory.of(0, rank)],
        ),
        "gather(parts[1], parts)": Case(
            lambda g, a: dist.gather(
                gathered[1 if rank == 0 else 0], gathered if rank == 0 else None, dst=0, group=g, async_op=a
            ),
            gathered if rank == 0 else [],
            memory.every() if rank == 0 else [],
        ),
        **_shared_together(memory),
    }


def _together(call: Callable[..., Any], *pairs: tuple[torch.Tensor, ...]) -> Callable[[Any, bool], Work]:
    def issue(group: Any, is_async: bool) -> Work:
        works: list[Work] = []
        with together(group, is_async, works):
            for pair in pairs:
                call(*pair, group=group)
        return works[0]

    return issue


def _shared_together(memory: Memory) -> dict[str, Case]:
    """Collectives issued together, of which one writes what another reads or writes."""
    rank, world = memory.rank, memory.world
    twice, halves = memory.of(rank), torch.cat([memory.of(rank), memory.of(rank, 1)])
    outputs, inputs = [torch.zeros(world * N), torch.zeros(world * N)], [memory.of(rank), memory.of(rank, 1)]
    outputs[1][N * (world - 1) :] = inputs[0]  # the first input is the end of the second output
    sums, given = torch.cat(memory.mine()), torch.cat([memory.of(rank, slot + 7) for slot in range(world)])
    return {
        "coalesced all_reduce of x and x": Case(
            _together(dist.all_reduce, (twice,), (twice,)), [twice], [memory.total()]
        ),
        "coalesced all_reduce of parts that overlap": Case(
            _together(dist.all_reduce, (halves[: N + 2],), (halves[N:],)),
            [halves],
            [torch.cat([memory.total(), memory.total(1)])],
        ),
        "coalesced all_gather into another's input": Case(
            _together(all_gather_single, (outputs[0], outputs[1][N * (world - 1) :]), (outputs[1], inputs[1])),
            outputs,
            [torch.cat(memory.every(slot)) for slot in range(2)],
        ),
        "coalesced reduce_scatter into another's input": Case(
            _together(reduce_scatter_single, (given[:N], sums), (sums[:N], given)),
            [given[:N], sums[:N]],
            [memory.total(rank), memory.total(rank + 7)],
        ),
    }


# ---- the table -------------------------------------------------------------------------------------------------------

KINDS = ("plain", "strided", "negative", "empty")
# What gloo of torch 2.14 refuses, or computes from memory that is not the tensor's.
GLOO_DIFFERS = {
    *(f"strided {name}" for name in ("all_reduce", "large all_reduce", "reduce", "broadcast", "scatter", "messages")),
    *("strided reduce_scatter", "strided all_to_all_single", "negative"),
    *("shared all_to_all_single(x, x)", "shared scatter(parts[1], parts)"),
}


def _wrong(case: Case) -> bool:
    return not all(map(torch.equal, case.found, case.right))


def _tried(case: Case, group: Any, is_async: bool) -> str:
    """A description of what went wrong; empty if nothing did."""
    try:
        work = case.issue(group, is_async)
        if is_async:
            work.wait()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return f"found {case.found}, expected {case.right}" if _wrong(case) else ""


def _every_case() -> list[str]:
    """List wrong values on this rank: those of shm, and those of gloo unless gloo is known to differ."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    groups = {"shm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for kind in (*KINDS, "shared"):
        memory = Memory("plain" if kind == "shared" else kind, rank, world)
        rows = partial(shared if kind == "shared" else plain, memory)
        for name in rows():
            for transport, group in groups.items():
                for is_async in (False, True):
                    if transport == "gloo" and {f"{kind} {name}", kind} & GLOO_DIFFERS:
                        continue
                    if found := _tried(rows()[name], group, is_async):
                        wrong.append(f"{transport} {kind} {name} {is_async}: {found}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_every_collective_means_the_same_whatever_its_memory(world: int) -> None:
    found = run_ranks(_every_case, world)
    assert not any(found), "\n".join(line for lines in found for line in lines)


@contextmanager
def reading_late(last: int) -> Iterator[None]:
    """Let this rank read a peer only after the peer has written all it can, up to the collective with this number."""
    read = Call.read

    def late(call: Call, token: Token, peer: int, into: torch.Tensor, start: int = 0) -> None:
        if NAMES[call.what] in ("all_gather", "reduce_scatter", "all_to_all"):
            seen = call.mailbox._collectives[peer]
            while not all(Place(number, 0, True) in seen for number in range(call.number, last + 1)):
                call.mailbox.receive(call.links[peer], ended=False)
                time.sleep(0)
        read(call, token, peer, into, start)

    Call.read = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        Call.read = read  # type: ignore[method-assign]


def _shared_while_one_is_late() -> list[str]:
    """List what is wrong on this rank while one rank, first or last in turn, begins before or after the others."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    rows = partial(shared, Memory("plain", rank, world))
    # The late rank of several collectives must have begun them all before it reads, so it is the first.
    cases = [(name, late, is_first) for name in rows() for late in (0, world - 1) for is_first in (True, False)]
    for name, late, is_first in cases:
        if not is_first and name.startswith("coalesced"):
            continue
        case, count = rows()[name], 2 if name.startswith("coalesced") else 1
        firsts = [late] if is_first else [one for one in range(world) if one != late]
        keys = [f"{name} {late} {is_first} {one}" for one in firsts]
        if rank not in firsts:
            store.wait(keys, WAIT)
        with reading_late(group._issued + count) if rank == late else nullcontext():
            work = case.issue(group, True)
            if rank in firsts:
                store.set(f"{name} {late} {is_first} {rank}", "begun")
            work.wait()
        if _wrong(case):
            wrong.append(f"rank {late} late, first {is_first}: {name}: found {case.found}, expected {case.right}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_reads_late_reads_what_was_sent_and_not_what_was_received(world: int) -> None:
    found = run_ranks(_shared_while_one_is_late, world)
    assert not any(found), "\n".join(line for lines in found for line in lines)


def _while_one_waits_elsewhere() -> list[str]:
    """List what is wrong on this rank while one rank, first or last in turn, waits in a store for the others."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    store = dist.distributed_c10d._get_default_store()
    rows = partial(plain, Memory("plain", rank, world))
    for name in rows():
        for elsewhere in (0, world - 1):
            case = rows()[name]
            work = case.issue(dist.group.WORLD, rank == elsewhere)
            if rank == elsewhere:
                store.wait([f"{name} {elsewhere} {one}" for one in range(world) if one != rank], WAIT)
                work.wait()
            store.set(f"{name} {elsewhere} {rank}", "ended")
            wrong += [f"{name}, rank {elsewhere} elsewhere"] if _wrong(case) else []
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_a_collective_ends_for_the_others_while_one_rank_waits_elsewhere(world: int) -> None:
    assert run_ranks(_while_one_waits_elsewhere, world) == [[]] * world


def _refused() -> list[str]:
    """The errors of tensors that cannot be read or written by their bytes."""
    told = []
    for tensor in (torch.zeros(1).expand(4), torch.eye(4).to_sparse()):
        with pytest.raises(PeerError) as caught:
            dist.all_reduce(tensor)
        told.append(str(caught.value))
    return told


def test_expanded_outputs_and_sparse_tensors_are_refused() -> None:
    for expanded, sparse in run_ranks(_refused, 2):
        assert "clone it" in expanded
        assert "use gloo for it" in sparse
