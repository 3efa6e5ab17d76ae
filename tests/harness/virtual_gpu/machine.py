"""The order of everything that runs on a virtual GPU and its host: vector clocks, and accesses by byte range.

[Note: happens before]
An actor is a stream of a device or a thread of the host; what one actor does is in order. A launch happens after
everything that its thread did or waited for. A stream that waits for an event happens after all that the event's stream
had been given when the event was recorded, and so does a thread that synchronizes with it. Two accesses of a byte, of
which at least one writes, must be ordered. `Clock` of an actor: the latest tick of every actor that happens before it.

[Note: a free writes]
The caching allocator hands a freed block to the next allocation on the same stream without waiting for anything. So a
free is a write of the block on the stream of its allocation, and every access by another stream must happen
before it. A block with recorded streams (`record_stream`) becomes free only after the work that these streams have been
given so far; see allocator.py.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

Actor = tuple[str, int]  # ("stream", id) or ("thread", number)
Range = tuple[int, int]  # bytes [low, high) of a storage
COMPUTE: Actor = ("stream", 0)
MAIN: Actor = ("thread", 0)
PRODUCT = ("/zero_runtime/", "/kernels/")
DEPTH = 3  # frames of a place


class Clock(dict[Actor, int]):
    def join(self, other: Clock) -> None:
        for actor, tick in other.items():
            if self.get(actor, 0) < tick:
                self[actor] = tick

    def covers(self, access: Access) -> bool:
        return access.tick <= self.get(access.actor, 0)


class Access(NamedTuple):
    """One operation's access of bytes [low, high) of a storage."""

    low: int
    high: int
    actor: Actor
    tick: int
    writes: bool
    operation: str
    place: str


@dataclass(frozen=True)
class Disorder:
    """Two accesses of the same bytes that are not ordered, in words."""

    kind: str
    later: str
    earlier: str
    allocated: str


@dataclass(frozen=True)
class Sync:
    """A point at which the host waits for the device. kind: what waits; place: the innermost product function."""

    kind: str
    place: str
    thread: str


@dataclass
class Machine:
    """One rank's virtual GPU and host. Not for use by two threads at the same time; threads.py makes them take turns.

    without: sites of waits that are left out, as faults. A site is a kind of wait and the functions that wait.
    """

    without: frozenset[str] = frozenset()
    waits: set[str] = field(default_factory=set)  # sites of all waits
    names: dict[Actor, str] = field(default_factory=lambda: {COMPUTE: "compute", MAIN: "main"})
    clocks: defaultdict[Actor, Clock] = field(default_factory=lambda: defaultdict(Clock))
    accesses: defaultdict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    allocated: dict[int, str] = field(default_factory=dict)  # place of each storage's allocation
    disorders: list[Disorder] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    operations: int = 0
    checked: int = 0  # pairs of accesses of the same bytes
    _tick: int = 0
    _seen: set[tuple[str, str, str]] = field(default_factory=set)

    # ---- actors ----------------------------------------------------------------------------------------------------

    def launch(
        self,
        thread: Actor,
        stream: Actor,
        operation: str,
        reads: Iterable[tuple[int, Range]] = (),
        writes: Iterable[tuple[int, Range]] = (),
    ) -> None:
        """A kernel or copy that `thread` gives to `stream`. reads, writes: storages with byte ranges."""
        self.clocks[stream].join(self.clocks[thread])
        self.act(stream, operation, reads, writes)

    def act(
        self,
        actor: Actor,
        operation: str,
        reads: Iterable[tuple[int, Range]] = (),
        writes: Iterable[tuple[int, Range]] = (),
    ) -> None:
        """The actor's next operation."""
        self._tick += 1
        self.operations += 1
        self.clocks[actor][actor] = self._tick
        here = place(DEPTH)
        for storage, (low, high) in reads:
            self._touch(storage, Access(low, high, actor, self._tick, False, operation, here))
        for storage, (low, high) in writes:
            self._touch(storage, Access(low, high, actor, self._tick, True, operation, here))

    def now(self, actor: Actor) -> Clock:
        """A copy of the actor's clock: what an event records."""
        return Clock(self.clocks[actor])

    def follow(self, actor: Actor, clock: Clock, kind: str) -> None:
        """Everything that the actor does from now on happens after what the clock covers."""
        site = f"{kind} at {place(DEPTH)}"
        self.waits.add(site)
        if site not in self.without:
            self.clocks[actor].join(clock)

    def synchronize(self, thread: Actor, clock: Clock, kind: str) -> None:
        """The thread blocks until the device has reached the clock."""
        self.syncs.append(Sync(kind, place(1), self.names[thread]))
        self.follow(thread, clock, f"host waits for {kind}")

    # ---- accesses --------------------------------------------------------------------------------------------------

    def _touch(self, storage: int, access: Access) -> None:
        low, high, actor, writes = access.low, access.high, access.actor, access.writes
        if low >= high:
            return
        clock = self.clocks[actor]
        kept = []
        for other in self.accesses[storage]:
            overlaps = other.low < high and low < other.high
            if overlaps and (writes or other.writes):
                self.checked += 1
                if not clock.covers(other):
                    self._report("access", self._describe(access), other, storage)
            within = low <= other.low and other.high <= high
            if not (within and (writes or (other.actor == actor and not other.writes))):
                kept.append(other)
        kept.append(access)
        self.accesses[storage] = kept

    def came(self, storage: int) -> None:
        """A storage has memory from now on."""
        self.accesses.pop(storage, None)
        self.allocated[storage] = place(DEPTH)

    def went(self, storage: int, clock: Clock) -> None:
        """A storage's memory may be used for something else by whatever happens after `clock`.

        A thread that uses a storage holds a reference to it, so a free waits for threads by itself; streams hold none.
        """
        for access in self.accesses.pop(storage, ()):
            self.checked += 1
            if access.actor[0] == "stream" and not clock.covers(access):
                self._report("free", f"free at {place(DEPTH)}", access, storage)
        self.allocated.pop(storage, None)

    def _report(self, kind: str, later: str, earlier: Access, storage: int) -> None:
        found = Disorder(kind, later, self._describe(earlier), self.allocated.get(storage, "before the first step"))
        key = (found.kind, found.later, found.earlier)
        if key not in self._seen:
            self._seen.add(key)
            self.disorders.append(found)

    def _describe(self, access: Access) -> str:
        verb = "write" if access.writes else "read"
        return f"{verb} by {self.names[access.actor]} in {access.operation} at {access.place}"


_names: dict[CodeType, str | None] = {}  # the name of each function; None outside of the product


def place(depth: int) -> str:
    """The innermost `depth` functions of the product on this thread's stack, the innermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if code not in _names:
            is_product = any(folder in code.co_filename for folder in PRODUCT)
            _names[code] = f"{Path(code.co_filename).name}:{code.co_name}" if is_product else None
        name = _names[code]
        if name is not None:
            found.append(name)
        frame = frame.f_back
    return " < ".join(found) or "the test"
