"""Operations of the backend shm end in whatever order ranks begin and wait for them, in threads, futures and forks."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from harness.patience import HANG_S, wait_until
from harness.ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from zero_runtime.same_host.group import create
from zero_runtime.same_host.links import Link, Token
from zero_runtime.same_host.mailbox import Mailbox
from zero_runtime.same_host.progress import Operation, Progress, progress

LARGE = 2**17 + 1  # elements of fp32: more than what is summed by all ranks at once


def _mine(add: int = 0, numel: int = LARGE) -> torch.Tensor:
    return torch.full((numel,), float(dist.get_rank() + add))


def _is_sum(tensor: torch.Tensor, add: int = 0) -> bool:
    world = dist.get_world_size()
    return bool((tensor == world * (world - 1) // 2 + world * add).all())


def _waited_backwards() -> bool:
    tensors = [_mine(number, 3 if number % 2 else LARGE) for number in range(6)]
    works = [dist.all_reduce(one, async_op=True) for one in tensors]
    dist.all_reduce(_mine(), async_op=True)  # never waited for
    order = range(6) if dist.get_rank() else reversed(range(6))
    for number in order:
        works[number].wait()
    return all(_is_sum(one, number) for number, one in enumerate(tensors))


def _groups_crosswise() -> bool:
    """Each rank waits in another group first; a gather and a reduction go on while it does."""
    groups = [dist.new_group() for _ in range(3)]
    rank, right = dist.get_rank(), True
    for turn in range(20):
        order = [groups[(rank + turn + number) % 3] for number in range(3)]
        for group in order:
            tensor, parts = _mine(turn), [torch.empty(LARGE) for _ in range(dist.get_world_size())]
            places = [dist.all_gather(parts, _mine(turn), group=group, async_op=True)]
            places.append(dist.reduce_scatter(torch.empty(LARGE), parts_of(tensor), group=group, async_op=True))
            right &= _kept(places, parts, turn)
    return right


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor] * dist.get_world_size()


_later: list[tuple[Any, list[torch.Tensor], int]] = []


def _kept(works: list[Any], parts: list[torch.Tensor], turn: int) -> bool:
    """Wait for the works of six calls ago, alternating which of the two comes first."""
    _later.append((works, parts, turn))
    if len(_later) < 6:
        return True
    works, parts, turn = _later.pop(0)
    for work in works if turn % 2 else reversed(works):
        work.wait()
    return all(bool((part == rank + turn).all()) for rank, part in enumerate(parts))


def _polled() -> bool:
    tensor = _mine()
    work = dist.all_reduce(tensor, async_op=True)
    wait_until(work.is_completed, 0.0)
    strided = torch.zeros(LARGE, 2)[:, 0]
    gathering = dist.all_gather([strided, *(torch.empty(LARGE) for _ in range(dist.get_world_size() - 1))], _mine(5))
    assert gathering is None
    return _is_sum(tensor) and bool((strided == 5).all())


def _in_futures() -> bool:
    """Futures end although nobody waits; what follows them may itself begin a collective and wait for it."""
    right: list[bool] = []
    ended = threading.Event()

    def follow(future: torch.futures.Future[Any]) -> None:
        second = _mine(2)
        dist.all_reduce(second, async_op=True).get_future().wait()
        third = _mine(3)
        dist.all_reduce(third)
        right.extend([_is_sum(future.value()[0], 1), _is_sum(second, 2), _is_sum(third, 3)])
        ended.set()

    laid = torch.zeros(LARGE, 2)[:, 1]
    laid.copy_(_mine(1))
    dist.all_reduce(laid, async_op=True).get_future().then(follow)
    assert ended.wait(HANG_S)
    return right == [True] * 3 and _is_sum(laid, 1)


def _in_threads() -> bool:
    """Two threads with a group each wait at the same time, and begin operations while the other advances them."""
    groups, right = [dist.new_group() for _ in range(2)], []

    def work(group: Any, numel: int) -> None:
        strided = torch.zeros(numel, 2)
        for turn in range(40):
            one = strided[:, turn % 2].copy_(_mine(turn, numel))
            dist.all_reduce(one, group=group, async_op=True).wait()
            right.append(_is_sum(one, turn))

    threads = [
        threading.Thread(target=work, args=(group, numel)) for group, numel in zip(groups, (5, LARGE), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(right) == 80 and all(right)


def _sent_ahead() -> bool:
    """More messages than a socket holds, none of which is received before all are sent."""
    count, rank = 600, dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.tensor([float(number)]), 1, tag=number % 2) for number in range(count)]
        for work in works:
            work.wait()
        return True
    if rank == 1:
        time.sleep(0.2)
        found = torch.zeros(count)
        for tag in (1, 0):  # those of one tag in their order, after those of the other
            for number in range(tag, count, 2):
                dist.recv(found[number : number + 1], 0, tag=tag)
        return torch.equal(found, torch.arange(count, dtype=torch.float32))
    return True


class _Counted(TorchDispatchMode):
    """A mode of torch that must not see what operations do."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _in_modes() -> bool:
    with torch.inference_mode():
        inferred = _mine()
        laid = torch.zeros(LARGE, 2)[:, 0].copy_(inferred)
        works = [dist.all_reduce(inferred, async_op=True), dist.all_reduce(laid, async_op=True)]
    for work in works:
        work.wait()
    tensor = _mine()
    parts = parts_of(tensor)
    total = torch.empty_like(tensor)
    work = dist.reduce_scatter(total, parts, async_op=True)
    with _Counted() as mode, torch.device("meta"):
        work.wait()
    return mode.calls == 0 and _is_sum(inferred) and _is_sum(laid) and _is_sum(total)


def _forked() -> bool:
    """A child of a rank neither disturbs its groups, nor keeps their ends from the others."""
    group = dist.new_group()
    works = [dist.all_reduce(_mine(number), async_op=True) for number in range(4)]
    child = _fork(_use_nothing)
    for work in works:
        work.wait()
    code = os.waitpid(child, 0)[1]
    after = _mine(1)
    dist.all_reduce(after)
    lasting = _fork(lambda: time.sleep(HANG_S))
    dist.barrier()
    try:
        if dist.get_rank() == 1:
            dist.destroy_process_group(group)
            heard = True
        else:
            try:
                dist.broadcast(_mine(), 1, group=group)
                heard = False
            except RuntimeError as error:
                heard = "rank 1" in str(error) and "left the group" in str(error)
        dist.barrier()
    finally:
        os.kill(lasting, signal.SIGKILL)
        os.waitpid(lasting, 0)
    return code == 0 and _is_sum(after, 1) and heard


def _used_in_a_child() -> bool:
    """A forked child that begins or awaits an operation of its parent's gets an error; the ranks' numbers are right."""
    group, rank = dist.new_group(), dist.get_rank()
    awaited = dist.all_reduce(_mine(), group=group, async_op=True) if rank == 0 else None  # no other rank has begun it
    child = _fork(lambda: _raise_in_each(lambda: dist.all_reduce(_mine(100)), awaited.wait)) if awaited else 0
    dist.barrier()
    right = []
    for turn in range(3):
        tensor = _mine(turn)
        dist.all_reduce(tensor)
        right.append(_is_sum(tensor, turn))
    if awaited is None:
        dist.all_reduce(_mine(), group=group)
    else:
        awaited.wait()
        right.append(os.waitpid(child, 0)[1] == 0)
    return all(right)


def _raise_in_each(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(RuntimeError, match="was forked from a rank"):
            call()


def _fork(act: Callable[[], object]) -> int:
    if pid := os.fork():
        return pid
    try:
        act()
    finally:
        os._exit(os.EX_OK if sys.exc_info()[0] is None else os.EX_SOFTWARE)


def _use_nothing() -> None:
    gc.unfreeze()
    dist.destroy_process_group()
    gc.collect()


def _met_again() -> bool:
    """Ranks that leave their groups and join again meet anew, also in a store that has what they once wrote."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank, world = dist.get_rank(), dist.get_world_size()
    kinds = []
    for turn in range(3):
        time.sleep(0.2 if rank == turn % world else 0.0)  # the others would take what this rank wrote before
        group: Any = create(store, rank, world, timedelta(seconds=HANG_S))
        tensor = _mine(turn)
        group.allreduce([tensor]).wait()
        kinds.append(type(group).__name__ if _is_sum(tensor, turn) else f"wrong sum in turn {turn}")
        group.shutdown()
    return kinds == ["SharedGroup"] * 3


def _saved_behind() -> bool:
    """torch saves a checkpoint in a thread while training goes on, and names a rank that is late at a barrier."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    group = dist.new_group()
    state = {"weight": _mine(), "own": {str(dist.get_rank()): _mine(1, 3)}}
    saving = checkpoint.async_save(state, checkpoint_id=folder[0], process_group=group)
    tensor = _mine()
    dist.all_reduce(tensor)
    saving.result()
    loaded = {"own": {str(dist.get_rank()): torch.zeros(3)}}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    dist.monitored_barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return _is_sum(tensor) and torch.equal(loaded["own"][str(dist.get_rank())], state["own"][str(dist.get_rank())])


CASES: list[Callable[[], bool]] = [
    *(_waited_backwards, _groups_crosswise, _polled, _in_futures, _in_threads, _sent_ahead, _in_modes, _forked),
    *(_used_in_a_child, _met_again, _saved_behind),
]


def _all_cases() -> dict[str, bool]:
    found = {}
    for case in CASES:
        found[case.__name__] = case()
        dist.barrier()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_operations_end_in_any_order(world: int) -> None:
    assert run_ranks(_all_cases, world) == [{case.__name__: True for case in CASES}] * world


# ---- without ranks ---------------------------------------------------------------------------------------------------


def _linked() -> tuple[Link, Link]:
    """The two ends of a connection, of which each is watched as this process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(1, os.getpid(), ends[0]), Link(0, os.getpid(), ends[1])


def _token(number: int) -> Token:
    return Token(number, 0, 1, False, 8, 0, 0, 0, 0)


def test_tokens_keep_their_order_when_the_connection_is_full_and_two_threads_send() -> None:
    one, other = _linked()
    threads = [
        threading.Thread(target=lambda start=start: [one.send(_token(start + number)) for number in range(5000)])
        for start in (0, 10**6)
    ]
    for thread in threads:
        thread.start()
    found: list[int] = []

    def all_there() -> bool:
        one.flush()
        found.extend(token.number for token in other.receive())
        return len(found) >= 10**4

    wait_until(all_there, 0.0)
    for thread in threads:
        thread.join()
    for start in (0, 10**6):
        assert [number for number in found if start <= number < start + 10**6] == list(range(start, start + 5000))


def test_what_a_peer_sent_before_it_left_or_ended_is_received() -> None:
    one, other = _linked()
    one.send(_token(1))  # other never reads it, so that its end comes as a reset
    other.send(_token(2))
    other.close()
    one.send(_token(3))
    assert [token.number for token in one.receive()] == [2]
    assert one.fault == "has ended or left the group"
    late, peer = _linked()
    peer.send(_token(4))
    assert [token.number for token in late.receive(ended=True)] == [4]
    assert late.fault == "has ended"


def test_an_interrupt_ends_a_wait_and_leaves_the_operation() -> None:
    """KeyboardInterrupt reaches the waiting thread; the next wait goes on with the same operation."""
    own, other = _linked()
    mailbox, found = Mailbox(range(2)), Progress()
    found.add_links([own], mailbox.receive)

    def steps() -> Any:
        while not mailbox.take(1, (1, 0, False)):
            yield frozenset([1])

    operation = found.start(Operation("a test", steps(), {1: own}))
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        found.wait(operation, HANG_S)
    with pytest.raises(RuntimeError, match=r"a test has waited 0.1 s for rank 1 \(process \d+\)"):
        found.wait(operation, 0.1)
    other.send(_token(1))
    found.wait(operation, HANG_S)
    assert progress() is progress()


def test_a_waiting_rank_uses_no_processor_time() -> None:
    own, _other = _linked()
    found = Progress()
    found.add_links([own], Mailbox(range(2)).receive)
    operation = found.start(Operation("a test", iter([frozenset([1])] * 10**6), {1: own}))
    begun = time.process_time()
    with pytest.raises(RuntimeError, match="its limit"):
        found.wait(operation, timedelta(seconds=1).total_seconds())
    assert time.process_time() - begun < 0.5  # half of the time that a wait without sleep would use


def test_a_group_that_is_collected_with_the_interpreter_says_nothing() -> None:
    code = "\n".join(
        [
            "import os, torch",
            "from datetime import timedelta",
            "from zero_runtime.same_host.group import SharedGroup",
            "from zero_runtime.same_host.meeting import Meeting",
            "os.kept, torch.kept = (SharedGroup(Meeting({}), 0, 1, timedelta(seconds=1)) for _ in range(2))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (0, "")
