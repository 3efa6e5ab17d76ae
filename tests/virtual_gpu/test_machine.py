"""The checker of the virtual GPU itself: what counts as ordered, what a free waits for, which bytes are pending."""

from __future__ import annotations

import pytest
from harness.virtual_gpu.allocator import Allocator, Peaks
from harness.virtual_gpu.machine import COMPUTE, MAIN, Actor, Machine
from harness.virtual_gpu.threads import Turns, stand_ins

OTHER: Actor = ("stream", 1)
MEMORY = 7  # a storage
LOW, HIGH, ALL = (0, 64), (64, 128), (0, 128)


@pytest.fixture
def machine() -> Machine:
    machine = Machine()
    machine.names[OTHER] = "copies"
    return machine


def kinds(machine: Machine) -> list[str]:
    return [pair.kind for pair in machine.disorders]


def test_a_write_and_a_read_of_the_same_bytes_on_two_streams_need_an_event(machine: Machine) -> None:
    machine.launch(MAIN, COMPUTE, "fill", writes=[(MEMORY, ALL)])
    machine.launch(MAIN, OTHER, "copy", reads=[(MEMORY, LOW)])
    assert kinds(machine) == ["access"]


def test_a_stream_that_waits_for_an_event_is_ordered(machine: Machine) -> None:
    machine.launch(MAIN, COMPUTE, "fill", writes=[(MEMORY, ALL)])
    machine.follow(OTHER, machine.now(COMPUTE), "event")
    machine.launch(MAIN, OTHER, "copy", reads=[(MEMORY, LOW)])
    assert kinds(machine) == []


def test_an_event_covers_only_what_was_issued_before_it(machine: Machine) -> None:
    event = machine.now(COMPUTE)
    machine.launch(MAIN, COMPUTE, "fill", writes=[(MEMORY, ALL)])
    machine.follow(OTHER, event, "event")
    machine.launch(MAIN, OTHER, "copy", reads=[(MEMORY, LOW)])
    assert kinds(machine) == ["access"]


def test_reads_and_other_bytes_need_no_order(machine: Machine) -> None:
    machine.launch(MAIN, COMPUTE, "sum", reads=[(MEMORY, ALL)])
    machine.launch(MAIN, OTHER, "copy", reads=[(MEMORY, ALL)])
    machine.launch(MAIN, COMPUTE, "fill", writes=[(MEMORY + 1, LOW)])
    machine.launch(MAIN, OTHER, "fill", writes=[(MEMORY + 1, HIGH)])
    assert kinds(machine) == []


def test_a_launch_follows_what_its_thread_has_waited_for(machine: Machine) -> None:
    machine.launch(MAIN, COMPUTE, "fill", writes=[(MEMORY, ALL)])
    machine.synchronize(MAIN, machine.now(COMPUTE), "event")
    machine.launch(MAIN, OTHER, "copy", reads=[(MEMORY, ALL)])
    assert kinds(machine) == []
    assert [sync.kind for sync in machine.syncs] == ["event"]


def test_two_threads_are_ordered_by_a_signal_alone(machine: Machine) -> None:
    helper: Actor = ("thread", 1)
    machine.names[helper] = "helper"
    machine.act(MAIN, "write", writes=[(MEMORY, ALL)])
    machine.follow(helper, machine.now(MAIN), "signal")
    machine.act(helper, "read", reads=[(MEMORY, ALL)])
    assert kinds(machine) == []
    machine.act(MAIN, "write", writes=[(MEMORY, ALL)])
    assert kinds(machine) == ["access"]


def test_a_wait_that_is_left_out_orders_nothing() -> None:
    machine = Machine(without=frozenset({"event at the test"}))
    machine.names[OTHER] = "copies"
    machine.launch(MAIN, COMPUTE, "fill", writes=[(MEMORY, ALL)])
    machine.follow(OTHER, machine.now(COMPUTE), "event")
    machine.launch(MAIN, OTHER, "copy", writes=[(MEMORY, ALL)])
    assert len(kinds(machine)) == 1
    assert machine.waits == {"event at the test"}


# ---- memory ----------------------------------------------------------------------------------------------------------


def used_elsewhere(machine: Machine) -> Allocator:
    """A block of the compute stream that another stream has read."""
    allocator = Allocator(machine)
    allocator.allocate(MEMORY, 128, COMPUTE, MAIN)
    machine.launch(MAIN, COMPUTE, "fill", writes=[(MEMORY, ALL)])
    machine.follow(OTHER, machine.now(COMPUTE), "event")
    machine.launch(MAIN, OTHER, "copy", reads=[(MEMORY, ALL)])
    return allocator


def test_a_free_waits_for_no_other_stream(machine: Machine) -> None:
    used_elsewhere(machine).free(MEMORY, MAIN)
    assert kinds(machine) == ["free"]


def test_a_free_after_its_stream_has_waited_is_ordered(machine: Machine) -> None:
    allocator = used_elsewhere(machine)
    machine.follow(COMPUTE, machine.now(OTHER), "event")
    allocator.free(MEMORY, MAIN)
    assert kinds(machine) == []
    assert allocator.peaks() == Peaks(tensors=128, taken=128, pools=128)


def test_a_recorded_block_is_pending_until_the_host_has_waited(machine: Machine) -> None:
    allocator = used_elsewhere(machine)
    allocator.record(MEMORY, OTHER)
    allocator.free(MEMORY, MAIN)
    assert kinds(machine) == []
    allocator.allocate(MEMORY + 1, 128, COMPUTE, MAIN)
    assert allocator.peaks() == Peaks(tensors=128, taken=256, pools=256)
    machine.synchronize(MAIN, machine.now(OTHER), "event")
    allocator.free(MEMORY + 1, MAIN)
    allocator.begin()
    allocator.allocate(MEMORY + 2, 128, COMPUTE, MAIN)
    assert allocator.peaks().taken == 128  # it has the memory of the first block
    assert allocator.pending == 0


def test_streams_do_not_share_their_pools(machine: Machine) -> None:
    allocator = Allocator(machine)
    for storage, stream in ((1, COMPUTE), (2, OTHER)):
        allocator.allocate(storage, 128, stream, MAIN)
        allocator.free(storage, MAIN)
    assert allocator.peaks() == Peaks(tensors=128, taken=128, pools=256)


# ---- threads ---------------------------------------------------------------------------------------------------------


class Nothing:
    def __enter__(self) -> None:
        """What a helper thread enters here."""

    def __exit__(self, *_: object) -> None:
        """And leaves."""


@pytest.mark.parametrize(("late", "order"), [(False, ["job", "main"]), (True, ["main", "job"])])
def test_a_helper_runs_as_early_or_as_late_as_possible(machine: Machine, late: bool, order: list[str]) -> None:
    turns = Turns(machine, Nothing)
    turns.late = late
    ran: list[str] = []
    pool = stand_ins(turns)["ThreadPoolExecutor"](1)
    job = pool.submit(ran.append, "job")
    ran.append("main")
    job.result()
    pool.shutdown()
    assert ran == order


def test_threads_that_wait_for_each_other_are_an_error(machine: Machine) -> None:
    turns = Turns(machine, Nothing)
    with pytest.raises(RuntimeError, match="deadlock: main"):
        stand_ins(turns)["Future"]().result()
