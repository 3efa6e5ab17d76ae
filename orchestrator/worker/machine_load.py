"""Measures what other processes did to a run: their share of the cores.

/proc/stat counts for each core the time in which it worked for any process; the ranks of a machine know their own time.
The difference, as a share of the cores that the ranks may use and of the elapsed time, is what others took. The
command's own processes (screen, controller, tracker) also count as others, although they sleep most of the time while a
run is measured, and so do the kernel's own threads.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
PROCESSES = Path("/proc")
# user, nice, system, irq, softirq, steal (a hypervisor runs another machine on the core); guest time is already in user
_WORKING = (0, 1, 2, 5, 6, 7)


class Used(NamedTuple):
    """Seconds of processor time on one rank's machine during `wall_s`: this rank's own, and per core that of all
    processes. `busy_s` is empty if it cannot be measured there. beside_s: of the ranks that waited for their turns.
    counted_s: of this rank's clock, in counted steps. reference_ms: of the reference work next to each counted step."""

    host: str
    wall_s: float
    own_s: float
    busy_s: dict[int, float]
    beside_s: float = 0.0
    counted_s: float = 0.0
    reference_ms: Sequence[float] = ()


class LoadMeter:
    """Measures processor time on one rank, from `begin` to `end`."""

    def __init__(self, stat: Path = STAT, processes: Path = PROCESSES) -> None:
        self._stat, self._processes = stat, processes
        self._cores = usable_cores()
        self.begin()

    def begin(self, beside: Collection[int] = ()) -> None:
        """Starts the measured time; a later call restarts it. beside: the sessions of ranks that wait meanwhile."""
        self._beside = frozenset(beside)
        self._beside_s = session_seconds(self._processes, self._beside)
        self._start = self._read()

    def end(self) -> Used:
        """The time used since the last `begin`."""
        (wall, own, busy), (wall_then, own_then, busy_then) = self._read(), self._start
        return Used(
            platform.node(),
            wall - wall_then,
            own - own_then,
            {core: busy[core] - busy_then[core] for core in busy.keys() & busy_then.keys()},
            max(session_seconds(self._processes, self._beside) - self._beside_s, 0.0),
        )

    def _read(self) -> tuple[float, float, dict[int, float]]:
        return time.perf_counter(), time.process_time(), busy_seconds(self._stat, self._cores)


def usable_cores() -> frozenset[int]:
    """The cores that this process may use; empty if the system has no affinity."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def busy_seconds(stat: Path, cores: Collection[int]) -> dict[int, float]:
    """Seconds that each core has worked since the machine started; empty if the system does not report it."""
    try:
        lines = stat.read_text(encoding="utf-8").splitlines()
        tick = os.sysconf("SC_CLK_TCK")
        # In a container the file lists all cores of the machine: those of the cpuset are in the ranks' affinity.
        rows = {row[0]: row[1:] for row in (line.split() for line in lines) if row}
        return {core: sum(int(rows[f"cpu{core}"][column]) for column in _WORKING) / tick for core in cores}
    except (OSError, ValueError, KeyError, IndexError):
        return {}


def session_seconds(processes: Path, sessions: Collection[int]) -> float:
    """Processor time that the living processes of these sessions have taken."""
    ticks = 0
    for stat in processes.glob("[0-9]*/stat") if sessions else ():
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended meanwhile
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                ticks += int(fields[11]) + int(fields[12])  # user and system mode, see proc(5)
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def others_share(ranks: Sequence[Used]) -> float | None:
    """The largest share over the machines; None if one of them is unknown."""
    shares = [_on_one([rank for rank in ranks if rank.host == host]) for host in {rank.host for rank in ranks}]
    return None if None in shares else max(share for share in shares if share is not None)


def _on_one(ranks: Sequence[Used]) -> float | None:
    """The share on one machine, whose ranks may be bound to different cores."""
    busy: dict[int, float] = {}
    for rank in ranks:
        busy |= rank.busy_s
    wall_s = max(rank.wall_s for rank in ranks)
    # In a sandbox the file may exist but count nothing: at least our own work should be in it.
    if not all(rank.busy_s for rank in ranks) or not sum(busy.values()) or not wall_s:
        return None
    # Ranks that wait for their turns do not count as others: gloo's threads look for messages a hundred times a second,
    # about 1 % of a core for each rank, which measuring once more cannot avoid.
    others = sum(busy.values()) - sum(rank.own_s for rank in ranks) - max(rank.beside_s for rank in ranks)
    return min(max(others / (len(busy) * wall_s), 0.0), 1.0)
