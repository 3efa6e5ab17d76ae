"""On CUDA a collective that follows another is issued behind it on a side stream, and no stream waits for it early.

The tensors are fake ones on `cuda`; streams and collectives are replaced by stubs that write down their calls.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_alone
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_runtime import collectives as module
from zero_runtime.collectives import Collectives
from zero_runtime.phase_clock import PhaseClock


class Rehearsal:
    """Rank 5 of 8 with groups of 4 ranks, whose log says on which stream each collective is issued and awaited.

    shard_count: 4, or 8 for outer sharding.
    """

    def __init__(self, shard_count: int = 4) -> None:
        self.log: list[str] = []
        self.stream = "compute"
        torch.cuda.Stream = lambda device=None: "side"  # type: ignore[assignment, misc]
        torch.cuda.stream = self.on  # type: ignore[assignment]
        module._reduce_scatter = lambda shard, full, **_: self.started("reduce_scatter")
        module._all_gather = lambda full, shard, **_: self.started("all_gather")
        dist.all_reduce = lambda tensor, **_: self.started("all_reduce")
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.collectives = Collectives(shard_count, PhaseClock(torch.device("cpu")), group_ranks=4)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def started(self, kind: str) -> Any:
        self.log.append(f"{self.stream}: {kind}")
        return SimpleNamespace(wait=lambda: self.log.append(f"{self.stream}: wait for {kind}"), is_completed=bool)


def _reduced(device: str) -> tuple[list[str], list[str], bool, bool, list[str], dict[str, int]]:
    rehearsal = Rehearsal()
    with FakeTensorMode():
        full, shard = torch.empty(64, device=device), torch.empty(16, device=device)
        full_is_alive = weakref.ref(full.untyped_storage())
        pending = rehearsal.collectives.reduce(full, shard, "block")
        del full, shard
        gc.collect()
        at_issue, held = list(rehearsal.log), full_is_alive() is not None
        pending.wait()
        pending.wait()
        gc.collect()
    ops = [op.kind for op in rehearsal.collectives.journal.read()[1]]
    volumes = {kind: volume.elements for kind, volume in rehearsal.collectives.ledger.data.items()}
    return at_issue, rehearsal.log[len(at_issue) :], held, full_is_alive() is not None, ops, volumes


@pytest.fixture(scope="module")
def on_cuda() -> Any:
    return run_alone(_reduced, "cuda")


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    return run_alone(_reduced, "cpu")


def test_the_all_reduce_is_issued_with_the_reduce_scatter_behind_it_on_a_side_stream(on_cuda: Any) -> None:
    at_issue, at_wait, *_ = on_cuda
    assert at_issue == ["compute: reduce_scatter", "side: wait for reduce_scatter", "side: all_reduce"]
    assert at_wait == ["compute: wait for all_reduce"]


def test_the_reduced_tensors_are_held_until_the_compute_stream_waits(on_cuda: Any) -> None:
    """The side stream's wait releases torch's own reference while the reduce-scatter may still run."""
    _, _, held_before, held_after, *_ = on_cuda
    assert held_before
    assert not held_after


def test_on_the_cpu_the_all_reduce_is_issued_when_the_reduce_scatter_has_been_waited_for(on_cpu: Any) -> None:
    at_issue, at_wait, *_ = on_cpu
    assert at_issue == ["compute: reduce_scatter"]
    assert at_wait == [
        "compute: wait for reduce_scatter", "compute: all_reduce", "compute: wait for all_reduce"
    ]  # fmt: skip


def test_the_journal_and_the_ledger_are_the_same_on_both(on_cuda: Any, on_cpu: Any) -> None:
    assert on_cuda[4:] == on_cpu[4:]
    assert on_cuda[4] == ["reduce_scatter", "all_reduce"]
    assert on_cuda[5] == {"reduce_scatter": 48, "all_reduce": 16}


# ---- outer sharding --------------------------------------------------------------------------------------------------


def _outer(device: str) -> tuple[list[list[str]], dict[str, int]]:
    """The log of a reduction at its issue and its wait, and of a gather behind an exchange."""
    rehearsal = Rehearsal(8)
    collectives = rehearsal.collectives
    with FakeTensorMode():
        full, held = torch.empty(64, device=device), torch.empty(16, device=device)
        shard = held.chunk(2)[1]
        logs = []
        for start in (
            lambda: collectives.reduce(full, torch.empty(8, device=device), "block"),
            lambda: collectives.all_gather(full, held, "block", after=collectives.gather_across(held, shard, "block")),
        ):
            pending = start()
            logs.append(list(rehearsal.log))
            rehearsal.log.clear()
            pending.wait()
            logs.append(list(rehearsal.log))
            rehearsal.log.clear()
    return logs, {kind: volume.elements for kind, volume in collectives.ledger.data.items()}


def test_with_outer_sharding_each_second_collective_is_issued_behind_the_first_one() -> None:
    on_cuda, sent = run_alone(_outer, "cuda")
    assert on_cuda == [
        ["compute: reduce_scatter", "side: wait for reduce_scatter", "side: reduce_scatter"],
        ["compute: wait for reduce_scatter"],
        ["compute: all_gather", "side: wait for all_gather", "side: all_gather"],
        ["compute: wait for all_gather"],
    ]
    on_cpu, sent_on_cpu = run_alone(_outer, "cpu")
    assert on_cpu == [
        ["compute: reduce_scatter"],
        ["compute: wait for reduce_scatter", "compute: reduce_scatter", "compute: wait for reduce_scatter"],
        ["compute: all_gather"],
        ["compute: wait for all_gather", "compute: all_gather", "compute: wait for all_gather"],
    ]
    wanted = {"reduce_scatter": 48, "outer_reduce_scatter": 8, "outer_all_gather": 8, "all_gather": 48}
    assert sent == sent_on_cpu == wanted
