"""The copy of a rank's state for a background save is exactly as large as the state, and page-locked beside a GPU."""

from __future__ import annotations

import gc

import pytest
import torch
from harness.recorded_cuda import RecordedCuda, record_cuda

from zero_runtime.checkpoint.snapshot import Snapshot, StatePart


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    return record_cuda(monkeypatch)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def part(values: torch.Tensor) -> StatePart:
    return StatePart("master", "weight", 0, values.numel(), values)


def copied(snapshot: Snapshot, values: torch.Tensor) -> torch.Tensor:
    (copy,) = snapshot.copy([part(values)])
    assert isinstance(copy.values, torch.Tensor)
    assert torch.equal(copy.values, values.as_subclass(torch.Tensor))
    return copy.values


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_memory_is_used_again_and_grows_with_the_parts(cuda: RecordedCuda, on_gpu: bool) -> None:
    snapshot = Snapshot()
    small, large = torch.arange(5000.0), torch.arange(2**18 + 1.0)
    if on_gpu:
        small, large = small.as_subclass(OnGpu), large.as_subclass(OnGpu)
    first = copied(snapshot, small).data_ptr()
    assert copied(snapshot, small[:70]).data_ptr() == first
    last = copied(snapshot, large).data_ptr()
    assert copied(snapshot, small).data_ptr() == last
    assert list(cuda.registered) == ([last] if on_gpu else [])


def test_locked_memory_is_not_rounded_up_and_is_unlocked_with_its_owner(cuda: RecordedCuda) -> None:
    snapshot = Snapshot()
    values = torch.arange(2**18 + 1.0).as_subclass(OnGpu)
    copied(snapshot, values)
    assert [size - values.nbytes < 4096 for size in cuda.registered.values()] == [True]
    assert ("host", "waits for", 0) in cuda.calls, "the copies have ended"
    del snapshot
    gc.collect()
    assert cuda.registered == {}
