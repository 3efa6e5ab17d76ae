"""Copies that run as late as allowed: code that does not wait for a copy reads NaN."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from zero_runtime.offload.copy_streams import CopyEvent, PlainCopies


class _Late:
    """A copy that runs only when it is waited for."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._lock = threading.Lock()
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = (target, source)

    def wait(self) -> None:
        with self._lock, torch.no_grad():
            if self._pending is not None:
                target, source = self._pending
                target.copy_(source)
                self._pending = None

    hold_device = wait


class LateCopies(PlainCopies):
    """Copies as late as CUDA's may be: until the event is waited for, the target holds NaN, and a source in host memory
    has not been read. (A source on the device is read in the order of the work issued there, so it is read at the
    call.)"""

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        return self._late(target, source.detach().clone())

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        for mark in after:
            mark.wait()
        return self._late(target, source)

    def on_device(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), torch.nan, dtype=dtype, device=self._device)

    def _late(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        assert target.shape == source.shape
        assert target.dtype == source.dtype, "the two are one memory's bytes in another"
        with torch.no_grad():
            target.fill_(torch.nan)
        return _Late(target, source.detach())
