"""Copies with a GPU wait in the order that keeps memory a function of program order; here with recorded CUDA calls."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from harness.recorded_cuda import RecordedCuda, record_cuda

from zero_runtime.errors import OffloadError
from zero_runtime.offload.copy_streams import HELD_SOURCES, CudaCopies, PageLocked

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    return record_cuda(monkeypatch)


def test_sources_are_released_after_the_computing_stream_has_waited_for_their_copies(cuda: RecordedCuda) -> None:
    copies, alive = CudaCopies(CPU), []
    for number in range(6):
        source = torch.full((3,), float(number))
        alive.append(weakref.ref(source))
        cuda.calls.clear()
        copies.to_host(copies.on_host(3, torch.float32), source)
        del source
        gc.collect()
        held = [one() is not None for one in alive]
        assert sum(held) == min(number + 1, HELD_SOURCES)
        assert all(held[-HELD_SOURCES:])
        waits = [call for call in cuda.calls if call[:2] == ("compute", "waits for")]
        assert len(waits) == (number >= HELD_SOURCES), "one wait for each source that is released"
        # The copy follows what was computed before it, and the event follows the copy.
        assert [call[:2] for call in cuda.calls[-3:]] == [
            ("compute", "records"),
            ("down", "waits for"),
            ("down", "records"),
        ]
    cuda.calls.clear()
    copies.release_sources()
    assert [call[:2] for call in cuda.calls] == [("compute", "waits for")] * HELD_SOURCES
    assert not any(one() is not None for one in alive)


def test_the_wait_is_for_the_oldest_copy(cuda: RecordedCuda) -> None:
    copies, ends = CudaCopies(CPU), []
    for _ in range(4):
        copies.to_host(torch.empty(3), torch.ones(3))
        ends.append(cuda.calls[-1][2])
    waited = [number for stream, action, number in cuda.calls if (stream, action) == ("compute", "waits for")]
    assert waited == ends[: 4 - HELD_SOURCES]


def test_what_is_brought_is_written_after_earlier_work_and_read_after_the_copy(cuda: RecordedCuda) -> None:
    copies = CudaCopies(CPU)
    left = copies.to_host(torch.empty(3), torch.ones(3))
    cuda.calls.clear()
    target, event = copies.bring(torch.arange(3.0), [left])
    assert torch.equal(target, torch.arange(3.0))
    event.hold_device()
    (_, _, allocated), (_, _, first), (_, _, second), (_, _, copied), (_, _, read) = cuda.calls
    assert cuda.calls == [
        ("compute", "records", allocated),
        ("up", "waits for", first),
        ("up", "waits for", second),
        ("up", "records", copied),
        ("compute", "waits for", read),
    ]
    assert (first, read) == (allocated, copied)
    assert second == left.event.number


def test_a_copy_keeps_its_target_until_something_has_waited_for_it(cuda: RecordedCuda) -> None:
    copies, target = CudaCopies(CPU), torch.empty(3)
    alive = weakref.ref(target)
    event = copies.to_device(target, torch.ones(3))
    del target
    assert alive() is not None
    event.wait()
    assert alive() is None


def test_a_thread_that_enters_has_the_device(cuda: RecordedCuda) -> None:
    copies = CudaCopies(CPU)
    thread = threading.Thread(target=copies.enter_thread)
    thread.start()
    thread.join()
    assert cuda.current_devices == {thread.ident: CPU}


def test_locked_memory_is_not_rounded_up_to_a_power_of_two_and_is_unlocked(cuda: RecordedCuda) -> None:
    memory = PageLocked(CPU)
    tensor = memory.allocate(5 * 2**20 + 1, torch.uint8)
    assert tensor.numel() == 5 * 2**20 + 1
    assert list(cuda.registered) == [tensor.data_ptr()]
    assert cuda.registered[tensor.data_ptr()] - tensor.nbytes < 4096
    memory.close()
    assert cuda.registered == {}
    cuda.error = 2
    with pytest.raises(OffloadError, match=r"expected to lock 4,096 bytes .* found CUDA error 2"):
        memory.allocate(1, torch.uint8)
