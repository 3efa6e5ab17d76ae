"""Copies between device memory and host memory that overlap with computation: the CUDA part of offload.

Issuing a copy returns an event. Code that reads the target afterwards makes the device wait for the event
(`hold_device`: applies to work issued from then on) or makes the host wait (`wait`).

[Note: memory in program order]
The host issues work far ahead of the device. torch's allocator reuses a freed block immediately only for work of the
stream that the block was allocated on; a block that another stream has used (`record_stream`) comes back when the
host has seen that stream's event, which is too late: a step would take new memory for everything that it copies. So
all device memory of copies is allocated and freed on the stream that computes, and that stream waits for the copies:

- The source of a copy to the host is held until the computing stream has waited for the copy. It waits for the oldest
  of HELD_SOURCES copies before the next one, and in `release_sources` for all of them.
- The target of a copy to the device is allocated on the computing stream, and the copy waits for the work issued there
  before. The caller releases the target after the computing stream has waited for the copy.

The memory in use is then the same in every run, whatever the speed of the host, the device and the copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from zero_runtime.errors import OffloadError
from zero_runtime.offload.scratch_file import aligned_buffer
from zero_runtime.offload_plan import aligned

HELD_SOURCES = 2  # the device computes the next source while the previous two are copied


class CopyEvent:
    """A point in the sequence of the device's operations. This one has been reached, so its methods do nothing."""

    def hold_device(self) -> None:
        """Make work issued on the current stream from now on wait for the event. Does not block the host."""

    def wait(self) -> None:
        """Block the host until the event is reached."""


class Copies:
    """Copies in both directions between one device and the host. These are synchronous, within CPU memory: the same
    code path without a GPU, for tests and as a simple reference.

    `to_host`, `bring`, `release_sources` and `here` belong to the threads that issue the device's computation, one at a
    time; the other methods may be called from any thread that has called `enter_thread`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter_thread(self) -> None:
        """Make the device current in the calling thread. The first call of every thread that waits or copies: CUDA
        would otherwise use GPU 0 there, and take memory on it."""

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate [numel] in host memory that copies can access without blocking; valid until `close`."""
        return host_tensor(numel, dtype)

    def here(self) -> CopyEvent:
        """Event that is reached when all work issued on the current stream so far has run."""
        return CopyEvent()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Start copying `source` to `target` after all work issued on the current stream so far. The caller may release
        `source` immediately, but may not write to it."""
        target.copy_(source)
        return CopyEvent()

    def release_sources(self) -> None:
        """Make the device wait for all copies to the host, and release their sources. Does not block the host."""

    def bring(self, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> tuple[torch.Tensor, CopyEvent]:
        """Start copying [n] on the host to a new [n] on the device, once the events in `after` and all work issued on
        the current stream are reached. Release the new tensor only after `hold_device` or `wait` of its event."""
        target = torch.empty(source.numel(), dtype=source.dtype, device=self._device)
        # Earlier users of the target's memory ran on the current stream, and may not have finished.
        return target, self.to_device(target, source, [self.here(), *after])

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        """Start copying `source` to `target`, which exists on the device, once the events in `after` are reached."""
        for event in after:
            event.wait()
        target.copy_(source)
        return CopyEvent()

    def close(self) -> None:
        """Wait for all copies and release the host memory. Idempotent."""


class _Event(CopyEvent):
    """A CUDA event. The host thread sleeps while it waits: a spinning thread would take a core from the update.

    keeps: the target of the event's copy, kept alive until something has waited for the event.
    """

    def __init__(self, stream: torch.cuda.Stream, keeps: torch.Tensor | None = None) -> None:
        self._device, self._keeps = stream.device, keeps
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def hold_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)
        self._keeps = None

    def wait(self) -> None:
        self.event.synchronize()
        self._keeps = None


class HeldSources:
    """The last sources of copies to the host, in order. See [Note: memory in program order]."""

    def __init__(self) -> None:
        self._held: deque[tuple[torch.Tensor, CopyEvent]] = deque()

    def make_room(self) -> None:
        """Release sources until one more may be held."""
        self._release(HELD_SOURCES - 1)

    def add(self, source: torch.Tensor, event: CopyEvent) -> None:
        """Hold the source of a copy; `event` is the copy's."""
        self._held.append((source, event))

    def release(self) -> None:
        """Release all sources."""
        self._release(0)

    def _release(self, count: int) -> None:
        while len(self._held) > count:
            source, event = self._held.popleft()
            event.hold_device()
            del source


class HoldingCopies(Copies):
    """Copies that hold their sources, as CUDA's must: alone, the memory of a GPU's step on a CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._sources = HeldSources()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        self._sources.make_room()
        event = self._start_to_host(target, source)
        self._sources.add(source, event)
        return event

    def _start_to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        return super().to_host(target, source)

    def release_sources(self) -> None:
        self._sources.release()


class PageLocked:
    """Page-locked host memory for copies with one GPU.

    Ordinary memory is locked in place: torch's own pinned allocator would round each tensor up to a power of two.

    what, remedy: the start and the end of the message if memory cannot be locked.
    """

    def __init__(
        self, device: torch.device, what: str = "offload", remedy: str = "use a smaller offload.ratio"
    ) -> None:
        self._device, self._what, self._remedy = device, what, remedy
        self._locked: list[torch.Tensor] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] on the host; valid until `close`. OffloadError if the memory cannot be locked."""
        tensor = host_tensor(numel, dtype)
        if numel:
            size = aligned(tensor.nbytes)  # complete pages, which no other tensor shares
            with torch.cuda.device(self._device):  # the call creates a context on the current device
                self._check(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0), "lock", size)
            self._locked.append(tensor)
        return tensor

    def close(self) -> None:
        """Unlock all memory; no copy may be using it. Idempotent."""
        while self._locked:
            tensor = self._locked.pop()
            with torch.cuda.device(self._device):
                self._check(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()), "unlock", tensor.nbytes)

    def _check(self, error: Any, verb: str, size: int) -> None:
        if int(error) != 0:
            raise OffloadError(
                f"{self._what}: expected to {verb} {size:,} bytes of the host's memory for copies with {self._device}, "
                f"found CUDA error {int(error)}; {self._remedy}, or raise the limit on locked memory"
            )


class CudaCopies(HoldingCopies):
    """Copies between a GPU and page-locked host memory, with one stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        super().__init__(self._down.device)  # with its index
        self._host = PageLocked(self._device)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._host.allocate(numel, dtype)

    def here(self) -> CopyEvent:
        return _Event(torch.cuda.current_stream(self._device))

    def _start_to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        return _Event(self._down)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        with torch.cuda.stream(self._up):
            for event in after:
                event.hold_device()
            target.copy_(source, non_blocking=True)
        return _Event(self._up, keeps=target)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._sources.release()
        self._host.close()


def copies_for(device: torch.device) -> Copies | None:
    """Copies between this device and the host; None if the device computes in host memory."""
    return CudaCopies(device) if device.type == "cuda" else None


def host_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate [numel] at the start of memory pages that no other tensor shares."""
    nbytes = numel * dtype.itemsize
    return aligned_buffer(aligned(nbytes))[:nbytes].view(dtype)
