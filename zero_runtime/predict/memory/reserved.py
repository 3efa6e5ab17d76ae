"""What torch's caching allocator reserves for a training step: its model replays every tensor of some steps in order.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import Trace
from zero_runtime.predict.memory.caching_allocator import CachingAllocator, MemoryBlock
from zero_runtime.predict.memory.counted_unit import Block, Book, CountRules
from zero_runtime.predict.memory.step_memory import StepReplay
from zero_runtime.state_bytes import UnitSize

STEPS = 3  # the first records the order of the units; from the second on, each reserves what the one before did


@dataclass(frozen=True)
class Reserved:
    """The peaks of a step in bytes: of the allocator's blocks, and of the segments that it took from the driver."""

    allocated: int
    reserved: int


def reserved_peak(
    trace: Trace,
    units: Sequence[tuple[UnitSize, MixedPrecision]],
    rules: CountRules,
    *,
    prefetch: int,
    other: Sequence[int] = (),
    at_most: float = math.inf,
) -> Reserved:
    """The peaks over the first steps. other: bytes of tensors that exist throughout, such as buffers and inputs.
    at_most: once more is reserved, the peaks until then are returned: the allocator gives nothing back.

    All tensors are of the stream that computes: see [Note: memory in program order] in offload/copy_streams.py.
    """
    feeding = _Feeding(trace)
    for nbytes in filter(None, other):
        feeding.allocator.allocate(nbytes)
    allocator = feeding.allocator

    def reached(place: int) -> None:
        feeding.reach(place)
        if allocator.reserved > at_most:
            raise _Exceeded

    replay = StepReplay(trace, units, rules, prefetch=prefetch, book=feeding.book, reached=reached)
    with suppress(_Exceeded):
        for _ in range(STEPS):
            replay.step()
    return Reserved(allocator.peak_allocated, allocator.reserved)


class _Exceeded(Exception):
    """More is reserved than was asked about."""


class _Feeding:
    """Gives the tensors of both halves of a step to the allocator. held: the blocks of the tensors alive."""

    def __init__(self, trace: Trace) -> None:
        self.allocator = CachingAllocator()
        self.book = Book(told=self._told)
        self._held: dict[object, MemoryBlock] = {}
        self._trace = trace
        self._done = 0

    def reach(self, place: int) -> None:
        """Feed the events of the trace before this mark, or all after the last one."""
        trace, held, allocator = self._trace, self._held, self.allocator
        start = self._done if place else 0  # a micro-batch starts with its first event again
        events = trace.marks[place][0] if place < len(trace.marks) else len(trace.events)
        for event in trace.events[start:events]:  # a million in all: no call that could be left out
            number = event - 1 if event > 0 else -event - 1
            if trace.on_host[number]:
                continue
            if event > 0:
                held[number] = allocator.allocate(trace.sizes[number])
            else:
                allocator.free(held.pop(number))
        self._done = events

    def _told(self, block: Block, came: bool) -> None:
        if came:
            self._held[block] = self.allocator.allocate(block.nbytes)
        else:
            self.allocator.free(self._held.pop(block))
