"""Sweeps of the stub worker: a program that tests start, and readers of the records and processes that it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
from points import make_config

from orchestrator.config.schema import Cluster
from orchestrator.planning.point import Point
from orchestrator.records import sweep_record
from orchestrator.records.sweep_record import SweepPaths

COMMAND = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from orchestrator.machine import hardware
from orchestrator.commands.sweep import SweepRequest, run_quietly, run_sweep, watch
from points import STUB
from sweep_runs import points
output = Path({output!r})
found = points(output, {micros})
request = SweepRequest("batch", found, ("sweeps=batch",), predicts=False, entry=STUB, detach={detach})
raise SystemExit(run_sweep(request, hardware.detect()))
"""


def points(output: Path, micros: list[int], *, ranks: int = 1, exclusive: bool = False) -> tuple[Point, ...]:
    found = []
    for micro in micros:
        config = make_config(output)
        config = replace(
            config,
            batch=replace(config.batch, micro=micro, global_size=2 * ranks * micro),
            resources=replace(config.resources, ranks=ranks),
            cluster=Cluster(exclusive=exclusive),
        )
        found.append(Point(f"micro{micro}", config, (f"batch.micro={micro}",)))
    return tuple(found)


def states(sweep: SweepPaths) -> list[str]:
    return [one.state.value for one in sweep_record.standings(sweep)]


def attempts(output: Path) -> list[Path]:
    return sorted(output.glob("points/*/attempts/*"))


def left_behind(output: Path) -> list[str]:
    """Command lines of the running processes that name this output folder."""
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if str(output) in " ".join(process.info["cmdline"] or [])
    ]


def the_sweep(output: Path) -> SweepPaths:
    return sweep_record.all_sweeps(output)[0]
