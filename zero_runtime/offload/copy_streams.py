"""Copies between device memory and host memory that overlap with computation: the CUDA part of offload.

[Note: what waits for what]
Issuing a copy returns an event. Code that reads the target afterwards makes the device wait for the event
(`hold_device`: applies to work issued from then on) or makes the host wait (`wait`). Device buffers belong to the
stream that fills them, so filling one waits for nothing; `used_here` keeps the allocator from reusing a buffer while
the current stream reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zero_runtime.errors import OffloadError
from zero_runtime.offload.memory import aligned
from zero_runtime.offload.scratch_file import aligned_buffer


class CopyEvent(Protocol):
    """A point in the sequence of the device's operations."""

    def hold_device(self) -> None:
        """Make work issued on the current stream from now on wait for the event. Does not block the host."""

    def wait(self) -> None:
        """Block the host until the event is reached."""


class Copies(Protocol):
    """Copies in both directions between one device and the host, from any thread. See [Note: what waits for what]."""

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate [numel] in host memory that copies can access without blocking; valid until `close`."""
        ...

    def on_device(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate [numel] in device memory, for `to_device` to fill."""
        ...

    def here(self) -> CopyEvent:
        """Event that is reached when all work issued on the current stream so far has run."""
        ...

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Start copying `source` to `target` after all work issued on the current stream so far."""
        ...

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        """Start copying `source` to `target` once the events in `after` are reached."""
        ...

    def used_here(self, buffer: torch.Tensor) -> None:
        """Record that the current stream reads or writes this buffer from `on_device`."""

    def close(self) -> None:
        """Wait for all copies and release the host memory. Idempotent."""


class _Reached:
    def hold_device(self) -> None:
        """A no-op: the event has already been reached."""

    def wait(self) -> None:
        """A no-op: the event has already been reached."""


class PlainCopies:
    """Synchronous copies within CPU memory: the same code path without a GPU, for tests and as a simple reference."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return host_tensor(numel, dtype)

    def on_device(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def here(self) -> CopyEvent:
        return _Reached()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        target.copy_(source)
        return _Reached()

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        for event in after:
            event.wait()
        target.copy_(source)
        return _Reached()

    def used_here(self, buffer: torch.Tensor) -> None:
        """A no-op: there is only one stream."""

    def close(self) -> None:
        """A no-op: the memory is freed with its tensors."""


class _Event:
    """A CUDA event. The host thread sleeps while it waits: a spinning thread would take a core from the update."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def hold_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """Copies between a GPU and page-locked host memory, with one stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._locked: list[torch.Tensor] = []

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Lock ordinary memory in place: torch's own pinned allocator would round each tensor up to a power of two."""
        tensor = host_tensor(numel, dtype)
        if numel:
            size = aligned(tensor.nbytes)  # complete pages, which no other tensor shares
            self._check(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0), "lock", size)
            self._locked.append(tensor)
        return tensor

    def on_device(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self._up):
            return torch.empty(numel, dtype=dtype, device=self._device)

    def here(self) -> _Event:
        return _Event(torch.cuda.current_stream(self._device))

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> _Event:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._down)
        return _Event(self._down)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> _Event:
        with torch.cuda.stream(self._up):
            for event in after:
                event.hold_device()
            target.copy_(source, non_blocking=True)
        target.record_stream(self._up)
        return _Event(self._up)

    def used_here(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        while self._locked:
            tensor = self._locked.pop()
            self._check(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()), "unlock", tensor.nbytes)

    def _check(self, error: Any, verb: str, size: int) -> None:
        if int(error) != 0:
            raise OffloadError(
                f"offload: expected to {verb} {size:,} bytes of the host's memory for copies with {self._device}, "
                f"found CUDA error {int(error)}; use a smaller offload.ratio, or raise the limit on locked memory"
            )


def copies_for(device: torch.device) -> Copies | None:
    """Copies between this device and the host; None if the device computes in host memory."""
    return CudaCopies(device) if device.type == "cuda" else None


def host_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate [numel] at the start of memory pages that no other tensor shares."""
    nbytes = numel * dtype.itemsize
    return aligned_buffer(aligned(nbytes))[:nbytes].view(dtype)
