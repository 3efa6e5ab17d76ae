"""Copies that come as late as they may: what does not wait for one reads noise."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from zero_runtime.offload.copy_streams import CopyEvent, PlainCopies


class _Late:
    """A copy that is made when somebody waits for it, and not before."""

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
    """As CUDA's are allowed to be: until a mark is waited for, the target is not a number and the host's memory has not
    been read. (The device's is read in the order of what is issued there.)"""

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
