"""What torch's caching allocator reserves for a training step: its model replays every tensor of some steps in order.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
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
) -> Reserved:
    """The peaks over the first steps. other: bytes of tensors that exist throughout, such as buffers and inputs.

    All tensors are of the stream that computes: see [Note: memory in program order] in offload/copy_streams.py.
    """
    feeding = _Feeding(trace)
    for nbytes in filter(None, other):
        feeding.allocator.allocate(nbytes)
    replay = StepReplay(trace, units, rules, prefetch=prefetch, book=feeding.book, reached=feeding.reach)
    for _ in range(STEPS):
        replay.step()
    allocator = feeding.allocator
    return Reserved(allocator.peak_allocated, allocator.reserved)


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
        trace = self._trace
        start = self._done if place else 0  # a micro-batch starts with its first event again
        events = trace.marks[place][0] if place < len(trace.marks) else len(trace.events)
        for event in trace.events[start:events]:
            number = abs(event) - 1
            if not trace.on_host[number]:
                self._feed(number, trace.sizes[number], came=event > 0)
        self._done = events

    def _told(self, block: Block, came: bool) -> None:
        self._feed(block, block.nbytes, came=came)

    def _feed(self, what: object, nbytes: int, *, came: bool) -> None:
        if came:
            self._held[what] = self.allocator.allocate(nbytes)
        else:
            self.allocator.free(self._held.pop(what))
