"""What torch's caching allocator reserves for a step of another engine: its terms and the activations in program order.

The rules of peers.py say how many bytes exist at which moments, not which tensor comes before which one. What is added
here: tensors that stay come first; a term of forward and backward exists from the start of a micro-batch to its end, as
one tensor, or, if its `each` is given, as the parameters of the units that were used last; gradients come with each
unit's backward; tensors of the step one after the other. Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zero_runtime.predict.memory.activation_count import Mark, Trace
from zero_runtime.predict.memory.caching_allocator import CachingAllocator, MemoryBlock
from zero_runtime.predict.memory.peers import Moment, PeerMemory, PeerTerm
from zero_runtime.predict.memory.reserved import STEPS, Reserved
from zero_runtime.predict.memory.step_memory import DISTINCT

USES = (Mark.BEFORE_FORWARD, Mark.BEFORE_BACKWARD)


def peer_reserved(
    trace: Trace,
    rules: PeerMemory,
    units: Sequence[Sequence[int]],
    *,
    micro_batches: int = 1,
    other: Sequence[int] = (),
    expandable: bool = False,
) -> Reserved:
    """The peaks over the first steps, in bytes. units: elements of each parameter of the trace's units, in their order.
    other: bytes of tensors that exist throughout. expandable: with PYTORCH_ALLOC_CONF=expandable_segments:True, which
    is not torch's default."""
    replay = _Replay(trace, rules, units, CachingAllocator(expandable=expandable))
    replay.hold(other)
    for _ in range(STEPS):
        replay.step(min(micro_batches, DISTINCT))
    return Reserved(replay.allocator.peak_allocated, replay.allocator.reserved)


class _Units:
    """A term that holds the parameters of the units that were used last, of at most its bytes together."""

    def __init__(self, term: PeerTerm, units: Sequence[Sequence[int]], allocator: CachingAllocator) -> None:
        self._term, self._units, self._allocator = term, units, allocator
        self._held: deque[tuple[int, list[MemoryBlock]]] = deque()
        self._bytes = 0

    def use(self, unit: int) -> None:
        """Hold the unit. Those that were used first go before, so that its bytes have room."""
        if any(held == unit for held, _ in self._held):
            return
        needed = self._term.each * sum(self._units[unit])
        while self._held and self._bytes + needed > self._term.nbytes:
            self._let_go()
        if needed <= self._term.nbytes:  # the root of FSDP2 has a term of its own
            blocks = [self._allocator.allocate(self._term.each * numel) for numel in self._units[unit]]
            self._held.append((unit, blocks))
            self._bytes += needed

    def clear(self) -> None:
        while self._held:
            self._let_go()

    def _let_go(self) -> None:
        unit, blocks = self._held.popleft()
        self._bytes -= self._term.each * sum(self._units[unit])
        for block in blocks:
            self._allocator.free(block)


class _Replay:
    """Gives the tensors of steps to the allocator."""

    def __init__(
        self, trace: Trace, rules: PeerMemory, units: Sequence[Sequence[int]], allocator: CachingAllocator
    ) -> None:
        self.allocator, self._trace, self._params = allocator, trace, units
        self._terms = {moment: [one for one in rules.terms if _exists(one, moment)] for moment in Moment}
        self.hold([term.nbytes for term in self._terms[Moment.ALWAYS]])
        compute = self._terms[Moment.COMPUTE]
        self._by_unit = [_Units(term, units, allocator) for term in compute if term.each]
        self._in_compute = [term.nbytes for term in compute if not term.each]
        self._gradients: dict[int, list[MemoryBlock]] = {}

    def hold(self, sizes: Sequence[int]) -> list[MemoryBlock]:
        """Allocate tensors of so many bytes."""
        return [self.allocator.allocate(nbytes) for nbytes in sizes if nbytes]

    def step(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            self._micro_batch()
        every = [numel for unit in self._params for numel in unit]
        parts = (self._parts(term, every) if term.each else [term.nbytes] for term in self._terms[Moment.STEP])
        for block in self.hold([nbytes for sizes in parts for nbytes in sizes]):
            self.allocator.free(block)
        for blocks in self._gradients.values():
            for block in blocks:
                self.allocator.free(block)
        self._gradients.clear()

    def _micro_batch(self) -> None:
        trace, held = self._trace, self.hold(self._in_compute)
        storages: dict[int, MemoryBlock] = {}
        marks = iter([*trace.marks, (len(trace.events), None, 0)])
        position, kind, unit = next(marks)
        for count, event in enumerate(trace.events):
            while count == position and kind is not None:
                self._reach(kind, unit)
                position, kind, unit = next(marks)
            number = abs(event) - 1
            if trace.on_host[number] or not trace.sizes[number]:
                continue
            if event > 0:
                storages[number] = self.allocator.allocate(trace.sizes[number])
            else:
                self.allocator.free(storages.pop(number))
        while kind is not None:
            self._reach(kind, unit)
            position, kind, unit = next(marks)
        for block in [*held, *storages.values()]:
            self.allocator.free(block)
        for term in self._by_unit:
            term.clear()

    def _reach(self, kind: Mark, unit: int) -> None:
        if kind in USES:
            for term in self._by_unit:
                term.use(unit)
        elif kind is Mark.AFTER_BACKWARD and unit not in self._gradients:
            gradients = self._terms[Moment.GRADIENTS]
            sizes = (self._parts(term, self._params[unit]) for term in gradients)
            self._gradients[unit] = self.hold([nbytes for part in sizes for nbytes in part])

    def _parts(self, term: PeerTerm, numels: Sequence[int]) -> list[int]:
        """The bytes of a term that parameters of so many elements have of it."""
        total = sum(map(sum, self._params))
        return [term.nbytes * numel // total for numel in numels]


def _exists(term: PeerTerm, moment: Moment) -> bool:
    return term.moment is moment and not term.on_host and term.nbytes > 0
