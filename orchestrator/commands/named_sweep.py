"""Finds a sweep by what was typed, and the current state of its points."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.near import did_you_mean
from orchestrator.config.strict import Refusal
from orchestrator.launch.cluster import cluster_of
from orchestrator.records import sweep_record
from orchestrator.records.sweep_record import Standing, SweepPaths
from orchestrator.text.paths import program


def find_sweep(output: str, name: str) -> SweepPaths:
    """The sweep with this name. Refusal if no sweep or several match."""
    sweeps = sweep_record.all_sweeps(output)
    if not sweeps:
        single = " (the records of single runs are in its folder points/)" if (Path(output) / "points").is_dir() else ""
        start = f"give --output FOLDER, or start one: {program()} sweeps=stages"
        raise Refusal([f"there is no sweep in '{output}'{single}; {start}"])
    if name == "last":
        return sweeps[0]
    exact = [sweep for sweep in sweeps if sweep.name == Path(name).name]
    matching = exact or [sweep for sweep in sweeps if name in sweep.name]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise Refusal([f"'{name}' is a part of several: {' '.join(sweep.name for sweep in matching)}"])
    hint = did_you_mean(name, [sweep.name for sweep in sweeps])
    raise Refusal([f"there is no sweep '{name}'.{hint}      see: {program()} list"])


def standings_now(sweep: SweepPaths) -> list[Standing]:
    """The current state of the points; for a sweep on a cluster, the scheduler is asked first."""
    return cluster_of(sweep).look(sweep)
