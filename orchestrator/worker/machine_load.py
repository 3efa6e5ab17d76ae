"""How much of the cores other processes took while a run was measured, from Linux's accounting of processor time.

[Note: others' share]
/proc/stat counts for each core the time in which it worked, whoever it worked for; a machine's ranks know their own
time. What is left, as a share of the cores that the ranks may use and of the time, is what others took. A hypervisor
that runs somebody else on a core is one of them (steal). A container sees all cores of its machine there, so only those
of the ranks' affinity are counted: those of its cpuset. The command's own processes (screen, controller, tracker) are
others too, which sleep most of the time while a run is measured, and so is the kernel's work in threads of its own.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
_WORKING = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; a guest's time is in user already


class Used(NamedTuple):
    """Seconds of processor time on one rank's machine between two moments `wall_s` apart: its own, and by core
    everybody's. No cores: it cannot be known there."""

    host: str
    wall_s: float
    own_s: float
    busy_s: dict[int, float]


class LoadMeter:
    """Begun and ended by one rank."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._cores = usable_cores()
        self.begin()

    def begin(self) -> None:
        """The measured time starts now; a later call takes the place of an earlier one."""
        self._start = self._read()

    def end(self) -> Used:
        """Since the last `begin`."""
        (wall, own, busy), (wall_then, own_then, busy_then) = self._read(), self._start
        return Used(
            platform.node(),
            wall - wall_then,
            own - own_then,
            {core: busy[core] - busy_then[core] for core in busy.keys() & busy_then.keys()},
        )

    def _read(self) -> tuple[float, float, dict[int, float]]:
        return time.perf_counter(), time.process_time(), busy_seconds(self._stat, self._cores)


def usable_cores() -> frozenset[int]:
    """Of this process; none where the system has no such thing."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def busy_seconds(stat: Path, cores: Collection[int]) -> dict[int, float]:
    """By core, the time since the start in which it worked; empty where the system does not say."""
    try:
        lines = stat.read_text(encoding="utf-8").splitlines()
        tick = os.sysconf("SC_CLK_TCK")
        rows = {row[0]: row[1:] for row in (line.split() for line in lines) if row}
        return {core: sum(int(rows[f"cpu{core}"][one]) for one in _WORKING) / tick for core in cores}
    except (OSError, ValueError, KeyError, IndexError):
        return {}


def others_share(ranks: Sequence[Used]) -> float | None:
    """See [Note: others' share]; of several machines that on which it was most. None where one cannot be known."""
    shares = [_on_one([one for one in ranks if one.host == host]) for host in {one.host for one in ranks}]
    return None if None in shares else max(one for one in shares if one is not None)


def _on_one(ranks: Sequence[Used]) -> float | None:
    """Ranks of one machine may be bound to different cores."""
    busy: dict[int, float] = {}
    for one in ranks:
        busy |= one.busy_s
    wall_s = max(one.wall_s for one in ranks)
    # A sandbox may have the file and count nothing in it: our own work at least would be there.
    if not all(one.busy_s for one in ranks) or not sum(busy.values()) or not wall_s:
        return None
    others = sum(busy.values()) - sum(one.own_s for one in ranks)
    return min(max(others / (len(busy) * wall_s), 0.0), 1.0)
