"""Process groups are made in one call for each kind, and destroyed in one order by ranks that succeeded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_alone, run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_runtime.errors import RankError
from zero_runtime.same_host import peer_memory, probe
from zero_runtime.world import RankGroups, WorldSettings, join_world, transport

WORLD = 8
SHARDS = [[0, 1, 2, 3], [4, 5, 6, 7]]
REPLICAS = [[0, 4], [1, 5], [2, 6], [3, 7]]


def _members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _destroyed_by_rank(shard_count: int) -> list[list[tuple[str, list[int]]]]:
    """For each rank: the kind and the members of the groups that it destroys, in order."""
    found = []
    for rank in range(WORLD):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        groups = RankGroups.make(shard_count)
        kinds = {id(group): kind for kind, group in groups._asdict().items() if group is not None}
        with mock.patch.object(dist, "destroy_process_group") as destroy:
            groups.destroy()
        found.append([(kinds[id(call.args[0])], _members(call.args[0])) for call in destroy.mock_calls])
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("shard_count", "kinds"),
    [(1, ["replica"]), (4, ["replica", "reduce", "gather"]), (8, ["reduce", "gather"])],
)
def test_every_rank_destroys_its_groups_in_the_reverse_order_of_making(shard_count: int, kinds: list[str]) -> None:
    by_rank = run_alone(_destroyed_by_rank, shard_count)
    for rank, destroyed in enumerate(by_rank):
        assert [kind for kind, _ in destroyed] == kinds
        assert all(rank in members for _, members in destroyed)


def test_a_rank_without_groups_has_none_to_destroy_even_after_it_left_the_world() -> None:
    assert not dist.is_initialized()
    RankGroups().destroy()


# ---- NCCL, whose functions are replaced ------------------------------------------------------------------------------


class Options:
    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream


def _without_launch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "")  # so that monkeypatch restores what the code sets
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Rank 5 of 8 on NCCL: `split` and `new` replace split_group and new_group and have their signatures."""
    _without_launch_order(monkeypatch)
    found = SimpleNamespace(
        split=mock.create_autospec(dist.split_group, side_effect=lambda **_: object()),
        new=mock.create_autospec(dist.new_group, side_effect=lambda members, **_: f"group of {members}"),
        destroy=mock.create_autospec(dist.destroy_process_group),
        world=SimpleNamespace(bound_device_id=torch.device("cuda", 5)),
    )
    for name, value in {
        "split_group": found.split,
        "new_group": found.new,
        "destroy_process_group": found.destroy,
        "get_backend": lambda: "nccl",
        "get_world_size": lambda: WORLD,
        "get_rank": lambda: 5,
        "group": SimpleNamespace(WORLD=found.world),
        "ProcessGroupNCCL": SimpleNamespace(Options=Options),
    }.items():
        monkeypatch.setattr(dist, name, value, raising=False)
    return found


def test_nccl_divides_all_ranks_in_one_call_for_each_kind_of_group(nccl: SimpleNamespace) -> None:
    groups = RankGroups.make(4)
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert [call.kwargs["split_ranks"] for call in nccl.split.mock_calls] == [SHARDS, SHARDS, REPLICAS]
    options = [call.kwargs["pg_options"] for call in nccl.split.mock_calls]
    assert all(one.is_high_priority_stream for one in options)
    assert len({id(one) for one in options}) == 3, "torch changes the options of a call"
    assert len({id(group) for group in groups if group is not None}) == 3
    nccl.new.assert_not_called()


def test_nccl_without_a_bound_device_makes_the_groups_one_by_one(nccl: SimpleNamespace) -> None:
    nccl.world.bound_device_id = None
    assert RankGroups.make(4) == ("group of [4, 5, 6, 7]", "group of [4, 5, 6, 7]", "group of [1, 5]", None, None, None)
    assert [call.args[0] for call in nccl.new.mock_calls] == [*SHARDS, *SHARDS, *REPLICAS]
    assert all(call.kwargs["pg_options"].is_high_priority_stream for call in nccl.new.mock_calls)
    nccl.split.assert_not_called()


@contextmanager
def closing(groups: RankGroups) -> Iterator[None]:
    try:
        yield
    finally:
        groups.destroy()


def test_a_rank_that_handles_an_error_destroys_no_communicator_of_nccl(
    nccl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers may never come to destroy theirs, and the destruction waits for all of them."""
    groups = RankGroups.make(4)
    with pytest.raises(ValueError, match="only on this rank"), closing(groups):
        raise ValueError("only on this rank")
    nccl.destroy.assert_not_called()
    groups.destroy()
    made = [group for group in groups if group is not None]
    assert [call.args[0] for call in nccl.destroy.mock_calls] == made[::-1]
    nccl.destroy.reset_mock()
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    with pytest.raises(ValueError, match="again"), closing(groups):
        raise ValueError("again")
    assert nccl.destroy.call_count == 3, "gloo destroys a group on each rank separately"


@pytest.mark.parametrize(("device", "given", "wanted"), [("cuda", None, "1"), ("cuda", "0", "0"), ("cpu", None, None)])
def test_joining_with_a_gpu_asks_nccl_for_the_order_of_the_host(
    device: str, given: str | None, wanted: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    seen = []
    _without_launch_order(monkeypatch)
    if given is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", given)
    at_start = mock.Mock(side_effect=lambda *_, **__: seen.append(os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")))
    monkeypatch.setattr(dist, "init_process_group", at_start)
    monkeypatch.setattr("zero_runtime.world.watch_ranks", lambda store, settings: None)
    monkeypatch.setattr("zero_runtime.world.make_current", lambda device: device)
    join_world(tmp_path / "rendezvous", 0, 1, torch.device(device, 0))
    assert seen == [wanted]
    assert at_start.call_args.args == ("nccl" if device == "cuda" else "gloo",)


def _policies_after_joining(policy: int) -> tuple[int, dict[str, int]]:
    """The scheduling classes of this thread, and of gloo's threads by number, after it joined with this class."""
    os.sched_setscheduler(0, policy, os.sched_param(0))
    with tempfile.TemporaryDirectory() as folder:
        with join_world(Path(folder, "rendezvous"), 0, 1, torch.device("cpu")):
            names = {task.name: (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
            gloo = {number: os.sched_getscheduler(int(number)) for number, name in names.items() if "gloo" in name}
        dist.destroy_process_group()
    return os.sched_getscheduler(0), gloo


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has the batch class")
def test_threads_of_gloo_that_wake_preempt_no_thread_that_sends() -> None:
    own, gloo = run_alone(_policies_after_joining, os.SCHED_OTHER)
    assert own == os.SCHED_BATCH
    assert gloo
    assert set(gloo.values()) == {os.SCHED_BATCH}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has the batch class")
def test_a_class_that_the_caller_chose_stays() -> None:
    own, _ = run_alone(_policies_after_joining, os.SCHED_IDLE)
    assert own == os.SCHED_IDLE


def _joined(folder: str, cases: list[tuple[str, bool]]) -> list[tuple[str, str]]:
    """By case what this rank's group is and why, or the error. A case: comm, and whether rank 1 may read no memory."""
    rank, found = dist.get_rank(), []
    libc = peer_memory._LIBC
    dist.destroy_process_group()
    for place, (comm, forbidden) in enumerate(cases):
        peer_memory._LIBC = None if forbidden and rank == 1 else libc
        try:
            join_world(Path(folder, str(place)), rank, 2, torch.device("cpu"), WorldSettings(comm=comm)).close()
            found.append(transport())
        except RankError as error:
            found.append(("error", str(error)))
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_a_world_of_cpu_ranks_is_what_was_asked_for_or_says_why_not(tmp_path: Path) -> None:
    cases = [("auto", False), ("shm", False), ("gloo", False), ("auto", True), ("shm", True), ("gloo", True)]
    reason = "this system has no process_vm_readv (Linux has)"
    expected = [
        *[("shm", ""), ("shm", ""), ("gloo", ""), ("gloo", reason)],
        *[("error", f"comm=shm: {reason}; comm=auto uses gloo there"), ("gloo", "")],
    ]
    if peer_memory.trouble() or probe.trouble():
        pytest.skip(f"ranks may not read each other here: {probe.trouble()}")
    assert run_ranks(_joined, 2, str(tmp_path), cases) == [expected, expected]
