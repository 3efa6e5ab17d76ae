"""Measures the time of a step by phase; every moment belongs to exactly one phase.

On a CPU a mark is a reading of the host's clock. On CUDA it is an event in the current stream, so a wait for a
collective counts only as far as it delays the compute stream, and reading the clock costs one synchronisation per step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

COMMUNICATION = "communication_exposed"
OTHER = "other"


class PhaseClock:
    """Collects marks, pairs of (phase that starts, time stamp); `lap` turns them into seconds by phase."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._stack = [OTHER]
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._mark(OTHER)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Assign the time inside the context to `name`, except the time inside nested phases."""
        self._stack.append(name)
        self._mark(name)
        try:
            yield
        finally:
            self._stack.pop()
            self._mark(self._stack[-1])

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap. On CUDA this waits for the device."""
        self._mark(self._stack[-1])
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (name, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] = seconds.get(name, 0.0) + _seconds_between(start, stop)
        self._marks = self._marks[-1:]
        return seconds

    def _mark(self, starting: str) -> None:
        if not self._on_cuda:
            self._marks.append((starting, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((starting, event))


def _seconds_between(start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(stop, float):
        return stop - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(stop, torch.cuda.Event)
    return start.elapsed_time(stop) / 1e3
