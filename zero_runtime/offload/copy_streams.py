"""Copies between the device's memory and the host's, beside what the device computes: CUDA's part of offload.

[Note: what waits for what]
A copy is issued and gives an event. What reads the target afterwards makes the device wait for it (`hold_device`: what
is issued from there on), or the host (`wait`). Buffers of the device belong to the stream that fills them, so
that filling one waits for nothing; `used_here` keeps it from being given to others while the current stream reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zero_runtime.errors import OffloadError
from zero_runtime.offload.memory import aligned
from zero_runtime.offload.scratch_file import aligned_buffer


class CopyEvent(Protocol):
    """A place in the order of what the device does."""

    def hold_device(self) -> None:
        """What is issued on the current stream from here on waits until it is reached. Does not block."""

    def wait(self) -> None:
        """Block the host until it is reached."""


class Copies(Protocol):
    """Both ways between one device and the host; from any thread. See [Note: what waits for what]."""

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] in memory of the host, which copies can reach without blocking; ours until `close`."""
        ...

    def on_device(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] in memory of the device, for `to_device` to fill."""
        ...

    def here(self) -> CopyEvent:
        """All that has been issued on the current stream so far."""
        ...

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Start copying what `source` holds after all that has been issued on the current stream."""
        ...

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        """Start copying when these events are reached."""
        ...

    def used_here(self, buffer: torch.Tensor) -> None:
        """The current stream reads or writes this buffer of `on_device`."""

    def close(self) -> None:
        """Nothing is under way and the host's memory is not used any more. Idempotent."""


class _Reached:
    def hold_device(self) -> None:
        """Nothing is ever behind."""

    def wait(self) -> None:
        """It has been reached."""


class PlainCopies:
    """Between two memories of a CPU, each copy at once: the same way without a device, for tests and for reading."""

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
        """There is one stream."""

    def close(self) -> None:
        """The memory goes with its tensors."""


class _Event:
    """A CUDA event. The host sleeps while it waits: a waiting thread that spins would take the update's core."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def hold_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """Between a GPU and page-locked memory, on a stream for each way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._locked: list[torch.Tensor] = []

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Locked in place: torch's own pinned allocator would round each tensor up to a power of two."""
        tensor = host_tensor(numel, dtype)
        if numel:
            size = aligned(tensor.nbytes)  # whole pages, which no other tensor shares
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
    """How shards move between this device and the host; None where the host's memory is the device's."""
    return CudaCopies(device) if device.type == "cuda" else None


def host_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """[numel] at the start of pages that no other tensor shares."""
    nbytes = numel * dtype.itemsize
    return aligned_buffer(aligned(nbytes))[:nbytes].view(dtype)
