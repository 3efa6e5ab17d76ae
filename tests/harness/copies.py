"""Copies that run as late as allowed: code that does not wait for a copy reads NaN."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from zero_runtime.offload.copy_streams import Copies, CopyEvent


class _Late:
    """A copy that runs only when it is waited for."""

    def __init__(self, copies: LateCopies, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies = copies
        self._lock = threading.Lock()
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = (target, source)

    def wait(self) -> None:
        self._copies.check_thread()
        with self._lock, torch.no_grad():
            if self._pending is not None:
                target, source = self._pending
                target.copy_(source)
                self._pending = None

    hold_device = wait


class LateCopies(Copies):
    """Copies as late as CUDA's may be: until the event is waited for, the target holds NaN, and a source in host memory
    has not been read. (A source on the device is read in the order of the work issued there, so it is read at the
    call.) A thread must call `enter_thread` before it copies or waits."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._threads = {threading.get_ident()}

    def enter_thread(self) -> None:
        self._threads.add(threading.get_ident())

    def check_thread(self) -> None:
        thread = threading.current_thread()
        assert thread.ident in self._threads, f"thread {thread.name} uses copies without a current device"

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        return self._late(target, source.detach().clone())

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        for mark in after:
            mark.wait()
        return self._late(target, source)

    def _late(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        self.check_thread()
        assert target.shape == source.shape
        assert target.dtype == source.dtype, "the two are one memory's bytes in another"
        with torch.no_grad():
            target.fill_(torch.nan)
        return _Late(self, target, source.detach())
