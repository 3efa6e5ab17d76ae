"""The rule of torch's caching allocator, in bytes: what tensors hold, and what the allocator has taken for them.

[Note: pending]
A freed block goes back to the pool of the stream that it was allocated on and is reused there without waiting. A
block that other streams have used (`record_stream`) stays pending: an event is recorded on each of them, and the block
is free only when the host has seen all of them complete. The host here is infinitely fast: it sees an event only by
waiting for it, so a block is pending until the host happens to synchronize past the event. That is the most memory that
the allocator can need (c10/cuda/CUDACachingAllocator.cpp: free, insert_events, process_events).

Pools are not shared: a block that was freed on one stream is not reused on another. Sizes are those of the tensors,
without the allocator's rounding.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from harness.virtual_gpu.machine import Actor, Clock, Machine


@dataclass
class Block:
    """The memory of one storage. recorded: streams other than its own that use it."""

    stream: Actor
    nbytes: int
    recorded: set[Actor] = field(default_factory=set)


@dataclass(frozen=True)
class Peaks:
    """The most bytes of a device at one time: of tensors, and with pending blocks; and the sum of the pools' peaks."""

    tensors: int
    taken: int
    pools: int


class Allocator:
    """The device memory of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._blocks: dict[int, Block] = {}
        self._pending: list[tuple[Block, Clock]] = []
        self._live: defaultdict[Actor, int] = defaultdict(int)  # bytes of tensors by pool
        self._held: defaultdict[Actor, int] = defaultdict(int)  # bytes of pending blocks by pool
        self.begin()

    def begin(self) -> None:
        """Measure peaks from now on."""
        self._tensors = self.live
        self._taken = self.live + self.pending
        self._pools = {stream: self._live[stream] + self._held[stream] for stream in {*self._live, *self._held}}

    @property
    def live(self) -> int:
        return sum(self._live.values())

    @property
    def pending(self) -> int:
        return sum(self._held.values())

    def peaks(self) -> Peaks:
        return Peaks(self._tensors, self._taken, sum(self._pools.values()))

    def knows(self, storage: int) -> bool:
        return storage in self._blocks

    def allocate(self, storage: int, nbytes: int, stream: Actor, thread: Actor) -> None:
        """The storage gets `nbytes` on the thread's current stream."""
        self._machine.came(storage)
        self._take_back(thread)
        self._blocks[storage] = Block(stream, nbytes)
        self._live[stream] += nbytes
        self._tensors = max(self._tensors, self.live)
        self._taken = max(self._taken, self.live + self.pending)
        self._pools[stream] = max(self._pools.get(stream, 0), self._live[stream] + self._held[stream])

    def record(self, storage: int, stream: Actor) -> None:
        """Tensor.record_stream: the stream uses the storage."""
        block = self._blocks.get(storage)
        if block is not None and stream != block.stream:
            block.recorded.add(stream)

    def free(self, storage: int, thread: Actor) -> None:
        """See [Note: a free writes] in machine.py and [Note: pending]."""
        block = self._blocks.pop(storage, None)
        if block is None:
            return
        machine = self._machine
        clock = machine.now(block.stream)
        clock.join(machine.clocks[thread])
        self._live[block.stream] -= block.nbytes
        if block.recorded:
            reached = Clock()
            for stream in block.recorded:
                reached.join(machine.clocks[stream])
            clock.join(reached)
            self._held[block.stream] += block.nbytes
            self._pending.append((block, reached))
        machine.went(storage, clock)

    def _take_back(self, thread: Actor) -> None:
        """Give pending blocks back whose events the host has seen complete."""
        seen = self._machine.clocks[thread]
        left = []
        for block, reached in self._pending:
            if all(tick <= seen.get(stream, 0) for stream, tick in reached.items() if stream in block.recorded):
                self._held[block.stream] -= block.nbytes
            else:
                left.append((block, reached))
        self._pending = left
