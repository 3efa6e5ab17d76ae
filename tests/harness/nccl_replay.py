"""Replays the deeds of all ranks with NCCL's semantics and finds the ranks that can never go on.

A collective is a kernel on the stream of its group: it starts when the stream's earlier entries have ended and one of R
places on the device is free, and ends when all members have started theirs. Of several kernels that could start, any
may be first; with NCCL_LAUNCH_ORDER_IMPLICIT they start in the order in which the host issued them. Making and
destroying a group are rendezvous of its members' hosts, and a group is destroyed after its kernels.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.lone_rank import COMPUTE, WORLD, Deed


class Script(NamedTuple):
    """What one rank's host does, and the members of each of its groups."""

    deeds: Sequence[Deed]
    members: Mapping[str, tuple[int, ...]]


class Kernel(NamedTuple):
    """One member's part of a collective. `place`: among the rank's kernels, in the host's order from 0."""

    group: str
    place: int
    what: tuple[str, str, int, str]


class Wait(NamedTuple):
    """A stream's wait until `count` entries of another stream have ended."""

    stream: str
    count: int


@dataclass
class Rank:
    """The state of one rank's host and device."""

    script: Script
    at: int = 0  # deeds done
    streams: dict[str, list[Kernel | Wait]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # entries of each stream
    running: set[str] = field(default_factory=set)  # streams whose next entry is a kernel that runs
    issued: dict[int, tuple[str, int]] = field(default_factory=dict)  # stream and count of each collective
    kernels: int = 0
    started: int = 0
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # kernels started, by group

    @property
    def deed(self) -> Deed | None:
        return self.script.deeds[self.at] if self.at < len(self.script.deeds) else None


class Replay:
    """One replay. places: R. in_host_order: kernels of a rank start in the order of their issue."""

    def __init__(self, scripts: Sequence[Script], *, places: int, in_host_order: bool, seed: int = 0) -> None:
        self.ranks = [Rank(script) for script in scripts]
        self._places, self._in_host_order = places, in_host_order
        self._random = random.Random(seed)
        self._started: dict[tuple[tuple[int, ...], str, int], list[int]] = defaultdict(list)  # ranks, by collective
        self._whats: dict[tuple[tuple[int, ...], str, int], tuple[str, str, int, str]] = {}
        self._met: dict[tuple[str, tuple[int, ...], str], set[int]] = defaultdict(set)
        self.mismatches: list[str] = []
        self._awake = list(range(len(scripts)))

    def run(self) -> dict[int, str]:
        """Go on until nothing can. Returns what each rank that has not ended waits for, or that it died."""
        while self._awake:
            rank = self._awake.pop()
            while self._act(rank) or self._advance(rank):
                pass
        return {rank: self._waits_in(one) for rank, one in enumerate(self.ranks) if one.deed is not None}

    def _waits_in(self, rank: Rank) -> str:
        deed = rank.deed
        assert deed is not None
        return f"{deed.what} {deed.group}".strip()

    # ---- the host ------------------------------------------------------------------------------------------------

    def _act(self, index: int) -> bool:
        """Do the host's next deed, if it can be done now."""
        rank = self.ranks[index]
        deed = rank.deed
        if deed is None or deed.what == "die":
            return False
        if deed.what == "issue":
            stream = rank.streams[deed.group]
            stream.append(Wait(deed.stream, len(rank.streams[deed.stream])))
            stream.append(Kernel(deed.group, rank.kernels, (deed.kind, deed.unit, deed.numel, deed.dtype)))
            rank.issued[deed.number] = deed.group, len(stream)
            rank.kernels += 1
        elif deed.what == "wait":
            rank.streams[deed.stream].append(Wait(*rank.issued[deed.number]))
        elif deed.what == "read":
            if not self._is_drained(rank, COMPUTE):
                return False
        elif not self._meets(index, deed):
            return False
        rank.at += 1
        return True

    def _meets(self, index: int, deed: Deed) -> bool:
        """Whether all members are at this rendezvous. Groups are made by all ranks of the world together."""
        rank = self.ranks[index]
        if deed.what == "destroy" and not self._is_drained(rank, deed.group):
            return False
        members = rank.script.members[WORLD if deed.what == "make" else deed.group]
        met = self._met[deed.what, members, deed.group]
        if index not in met:
            met.add(index)
            if len(met) == len(members):
                self._awake += [one for one in members if one != index]
        return len(met) == len(members)

    def _is_drained(self, rank: Rank, stream: str) -> bool:
        return rank.ended[stream] == len(rank.streams[stream])

    # ---- the device ----------------------------------------------------------------------------------------------

    def _advance(self, index: int) -> bool:
        """End the waits that can end and start the kernels that can start; returns whether any did."""
        rank = self.ranks[index]
        moved, ready = False, []
        for name, stream in rank.streams.items():
            while rank.ended[name] < len(stream) and name not in rank.running:
                entry = stream[rank.ended[name]]
                if isinstance(entry, Kernel):
                    if not self._in_host_order or entry.place == rank.started:
                        ready.append(entry)
                    break
                if rank.ended[entry.stream] < entry.count:
                    break
                rank.ended[name] += 1
                moved = True
        if ready and len(rank.running) < self._places:
            self._start(index, self._random.choice(ready))
            moved = True
        return moved

    def _start(self, index: int, kernel: Kernel) -> None:
        rank = self.ranks[index]
        members = rank.script.members[kernel.group]
        rank.started += 1
        rank.counts[kernel.group] += 1
        collective = members, kernel.group, rank.counts[kernel.group]
        wanted = self._whats.setdefault(collective, kernel.what)
        if wanted != kernel.what:
            self.mismatches.append(f"rank {index}: {kernel.group} number {collective[2]}: {kernel.what}, not {wanted}")
        rank.running.add(kernel.group)
        started = self._started[collective]
        started.append(index)
        if len(started) == len(members):
            for member in members:
                self.ranks[member].running.remove(kernel.group)
                self.ranks[member].ended[kernel.group] += 1
            self._awake += [one for one in members if one != index]


def interleaving(script: Script) -> list[Deed]:
    """The deeds that all ranks must do in the same order."""
    return [deed for deed in script.deeds if deed.what in ("make", "destroy", "issue")]
