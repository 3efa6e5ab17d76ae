"""Measures the time of a step by phase; every moment belongs to exactly one phase.

On a CPU a mark is a reading of the host's clock. On CUDA it is an event in the current stream, so a wait for a
collective counts only as far as it delays the compute stream, and reading a lap waits for the device unless it is past.
A clock that nobody has started makes no marks: most programs never read it, and the marks would grow without end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zero_runtime.errors import CallOrderError

COMMUNICATION = "communication_exposed"
OTHER = "other"
Mark = tuple[str, float | torch.cuda.Event]


class Lap:
    """What a clock measured between `start` and `end`.

    A lap that is read after the device has come to its end makes the host wait for nothing.
    """

    def __init__(self, marks: list[Mark], spare: list[torch.cuda.Event]) -> None:
        self._marks, self._spare = marks, spare

    def seconds(self) -> dict[str, float]:
        """Seconds by phase. Only the first call returns them. On CUDA this waits for the device to reach the end."""
        last = self._marks[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        seconds: dict[str, float] = {}
        for (name, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] = seconds.get(name, 0.0) + _seconds_between(start, stop)
        self.forget()
        return seconds

    def forget(self) -> None:
        """Drop the marks; their events are used again."""
        self._spare += [stamp for _, stamp in self._marks if isinstance(stamp, torch.cuda.Event)]
        self._marks.clear()


class PhaseClock:
    """Collects marks, pairs of (phase that starts, time stamp); a lap turns them into seconds by phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack = [OTHER]
        self._is_running = False
        self._marks: list[Mark] = []
        self._spare: list[torch.cuda.Event] = []  # events of laps that were read
        self._listener: Callable[[int, str], None] | None = None

    def start(self) -> None:
        """Begin to measure at this moment; what was measured since the last `end` is discarded."""
        self._forget()
        self._is_running = True
        self._mark(self._stack[-1])

    def stop(self) -> None:
        """Stop measuring; what was measured since the last `end` is discarded. A no-op unless started."""
        self._forget()
        self._is_running = False

    def listen(self, listener: Callable[[int, str], None] | None) -> None:
        """Call `listener` at each mark with the number of open phases and the phase that starts; None ends this.

        For profiles: a listener takes time, which the phases then include.
        """
        self._listener = listener

    def phase(self, name: str) -> Span:
        """A context: the time inside belongs to `name`, except that inside nested phases. It may be entered again."""
        return Span(self, name)

    def end(self) -> Lap:
        """End the measurement at this moment, without waiting for the device; CallOrderError unless started."""
        if not self._is_running:
            raise CallOrderError("end: expected a clock that measures, found one that does not; call start() first")
        self._mark(self._stack[-1])
        lap, self._marks = Lap(self._marks, self._spare), []
        self._is_running = False
        return lap

    def _mark(self, starting: str) -> None:
        if self._listener is not None:
            self._listener(len(self._stack) - 1, starting)
        if self._device.type != "cuda":
            self._marks.append((starting, time.perf_counter()))
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((starting, event))

    def _forget(self) -> None:
        Lap(self._marks, self._spare).forget()


class Span:
    """A phase of a clock, as a context without state of its own: every collective enters one twice."""

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        clock = self._clock
        clock._stack.append(self._name)
        if clock._is_running:
            clock._mark(self._name)

    def __exit__(self, *_: object) -> None:
        clock = self._clock
        clock._stack.pop()
        if clock._is_running:
            clock._mark(clock._stack[-1])


def _seconds_between(start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(stop, float):
        return stop - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(stop, torch.cuda.Event)
    return start.elapsed_time(stop) / 1e3
