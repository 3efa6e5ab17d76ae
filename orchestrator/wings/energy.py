"""Energy that counters of this machine have measured: of a GPU by NVML, of the processors by RAPL. Nothing is guessed.

[Note: energy]
A GPU's driver counts the millijoules that the whole board has used since it was loaded (Volta and newer). Linux shows
the counters of the processors' packages (RAPL), without the machine's memory and drives, usually to root alone; they
count what every process does. A counter that is missing or cannot be read leaves the energy unknown.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from orchestrator.rounds.recorded import Round
from orchestrator.wings.gpus import nvml
from orchestrator.worker.listeners import Listener, RankRun

POWERCAP = Path("/sys/class/powercap")


class EnergyCounter(Protocol):
    """A counter of energy. name: equal for two ranks exactly if they read the same counter. wraps_j: where it starts
    from 0 again; None: never."""

    name: str
    wraps_j: float | None

    def read_j(self) -> float:
        """Joules since some moment. OSError if it cannot be read."""


@dataclass
class GpuCounter:
    """The energy of one GPU by NVML."""

    name: str
    nvml: Any
    handle: Any
    wraps_j: float | None = None

    def read_j(self) -> float:
        try:
            return float(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) / 1e3
        except self.nvml.NVMLError as error:
            raise OSError(str(error)) from error


@dataclass
class PackageCounter:
    """The energy of one package of processors by RAPL."""

    name: str
    file: Path
    wraps_j: float | None

    def read_j(self) -> float:
        return int(self.file.read_text(encoding="ascii")) / 1e6


def gpu_counters(uuid: str) -> list[EnergyCounter]:
    """The counter of the GPU with this UUID, as NVML writes it; none without the package pynvml or without NVML."""
    known = nvml()
    if known is None:
        return []
    try:
        counter = GpuCounter(uuid, known, known.nvmlDeviceGetHandleByUUID(uuid))
        counter.read_j()
    except (known.NVMLError, OSError):
        return []
    return [counter]


def package_counters(powercap: Path = POWERCAP) -> list[EnergyCounter]:
    """The counters of all packages of processors; none unless all of them can be read."""
    found: list[EnergyCounter] = []
    try:
        for folder in sorted(powercap.glob("intel-rapl:*")):
            zone = (folder / "name").read_text(encoding="ascii").strip()
            if not zone.startswith("package"):
                continue
            wraps = int((folder / "max_energy_range_uj").read_text(encoding="ascii")) / 1e6
            counter = PackageCounter(f"{platform.node()} {zone}", folder / "energy_uj", wraps)
            counter.read_j()
            found.append(counter)
    except (OSError, ValueError):
        return []
    return found


class EnergyMeter:
    """Measures the energy of counters from `begin` to `end`."""

    def __init__(self, counters: Sequence[EnergyCounter] = ()) -> None:
        self._counters = counters
        self._before: dict[str, float] = {}

    def begin(self) -> None:
        """Starts the measured time; a later call restarts it."""
        self._before = self._read()

    def end(self) -> dict[str, float]:
        """Joules since the last `begin`, by counter; of those alone that could be read both times.

        A counter that started from 0 again is taken to have done so once: that of a package needs minutes for it.
        """
        used, read = {}, self._read()
        for counter in self._counters:
            now, before = read.get(counter.name), self._before.get(counter.name)
            if now is None or before is None:
                continue
            if now < before:
                if counter.wraps_j is None:
                    continue
                now += counter.wraps_j
            used[counter.name] = now - before
        return used

    @staticmethod
    def of_all(ranks: Sequence[Mapping[str, float]]) -> float | None:
        """The energy of all ranks, in which a counter of several ranks counts once; None if a rank has no counter."""
        if not ranks or not all(ranks):
            return None
        found: dict[str, float] = {}
        for rank in ranks:
            for name, joules in rank.items():
                found[name] = max(joules, found.get(name, 0.0))
        return sum(found.values())

    def _read(self) -> dict[str, float]:
        found = {}
        for counter in self._counters:
            with contextlib.suppress(OSError, ValueError):
                found[counter.name] = counter.read_j()
        return found


class Energy(Listener):
    """Records the energy of a step in each round."""

    def __init__(self, run: RankRun) -> None:
        super().__init__(run)
        self._meter = meter_of(run.runtime.device)
        self._steps_before = 0

    def before_round(self) -> None:
        self._steps_before = len(self.run.measurement.readings.step_s)
        self._meter.begin()

    def after_round(self, one: Round) -> None:
        """Adds the energy of all ranks. A collective."""
        steps = len(self.run.measurement.readings.step_s) - self._steps_before
        # Ranks may share a counter, which is counted once, so that all of them are needed at a time.
        joules = EnergyMeter.of_all(self.run.runtime.collectives.gather_objects(self._meter.end()))
        one.joules_per_step = None if joules is None else joules / steps


def meter_of(device: torch.device) -> EnergyMeter:
    """The meter of a rank with this device, of all counters that it can read."""
    if device.type != "cuda":
        return EnergyMeter(package_counters())
    return EnergyMeter(gpu_counters(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
