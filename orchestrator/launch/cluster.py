"""Where the points of a sweep run: this machine, or a cluster whose wing has the same contract."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from orchestrator.config.cluster import ClusterKind
from orchestrator.config.schema import Device, RunConfig
from orchestrator.machine import children, slots
from orchestrator.machine.hardware import Hardware, short_name
from orchestrator.machine.processes import started
from orchestrator.records import sweep_record
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.sweep_record import Planned, Standing, SweepPaths
from orchestrator.report.summary import Row
from orchestrator.wings import CLUSTERS, load


class SentPoints(NamedTuple):
    """What runs the points: their controller, a process on this machine, or the ids of the jobs of a scheduler."""

    process: subprocess.Popen[bytes] | None = None
    jobs: Sequence[str] = ()


@runtime_checkable
class SweepCluster(Protocol):
    """What a sweep asks of the place where its points run. Any call may raise ClusterError."""

    def namer(self, hardware: Hardware) -> Callable[[RunConfig], str]:
        """A function that names the hardware in the identity of a point. hardware: of this machine."""

    def preflight(self, configs: Sequence[RunConfig]) -> list[str]:
        """Why it can never run some of the points that need a run; asked before anything is written."""

    def cost(self, configs: Sequence[RunConfig]) -> list[Row]:
        """What the points that need a run will take, for the table of the plan."""

    def send(self, sweep: SweepPaths, planned: Sequence[Planned], entry: str, *, detached: bool) -> SentPoints:
        """Starts the points that need a run, and does not wait. detached: they go on without this process."""

    def look(self, sweep: SweepPaths) -> list[Standing]:
        """The state of every point now, after the records were brought up to date."""

    def runs(self, sweep: SweepPaths) -> bool:
        """Whether the sweep makes progress without a new command."""

    def cancel(self, sweep: SweepPaths, labels: Sequence[str] | None = None) -> None:
        """Asks for the end of these points, or of all, and does not wait for it."""


def cluster(kind: ClusterKind) -> SweepCluster:
    """The cluster of the setting cluster.kind."""
    if kind is ClusterKind.local:
        return LocalCluster()
    made: SweepCluster = load(CLUSTERS[kind.value])()
    return made


def cluster_of(sweep: SweepPaths) -> SweepCluster:
    """The cluster that an existing sweep was sent to."""
    return cluster(ClusterKind.slurm if sweep_record.is_on_cluster(sweep) else ClusterKind.local)


class LocalCluster(SweepCluster):
    """This machine: the points run under a controller, which keeps the records up to date (launch/controller.py)."""

    def namer(self, hardware: Hardware) -> Callable[[RunConfig], str]:
        def name(config: RunConfig) -> str:
            node = config.hardware
            return short_name(node.gpu or node.name) if node.is_described else hardware.name(config.resources.device)

        return name

    def preflight(self, configs: Sequence[RunConfig]) -> list[str]:
        return []  # the rules of the plan know this machine

    def cost(self, configs: Sequence[RunConfig]) -> list[Row]:
        """The slots of this machine. Points on described hardware take none."""
        here = [config for config in configs if not config.hardware.is_described]
        if not here:
            return []
        pools = {device: len(slots.pool_of(device).slots) for device in {one.resources.device for one in here}}
        taken = Counter(
            (config.resources.device, min(slots.wanted(config.resources), pools[config.resources.device]))
            for config in here
        )
        texts = []
        for (device, count), points in taken.items():
            word = "GPUs" if device is Device.cuda else "cores"
            at_a_time = 1 if here[0].cluster.exclusive else pools[device] // max(count, 1)
            taking = f"{points} points take" if points > 1 else "1 point takes"
            texts.append(f"{taking} {count} of {pools[device]} {word} each: {at_a_time} at a time")
        return [Row("slots", "; ".join(texts))]

    def send(self, sweep: SweepPaths, planned: Sequence[Planned], entry: str, *, detached: bool) -> SentPoints:
        """Starts the controller in a session of its own: Ctrl-C reaches only this command, which asks what to do."""
        line = children.words("orchestrator.launch.controller", str(sweep.root), "--entry", entry)
        if not detached:
            line += ["--viewer", str(os.getpid())]
        process = children.start(line, os.environ, sweep.log)
        # The controller records itself a moment later. Until then this claim shows that the sweep has a controller.
        try:
            write_json_atomic(sweep.claim, {"pid": process.pid, "started": started(process.pid)})
        except OSError:  # a full disk ends this command, and the controller would run on without a viewer
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return SentPoints(process)

    def look(self, sweep: SweepPaths) -> list[Standing]:
        return sweep_record.standings(sweep)

    def runs(self, sweep: SweepPaths) -> bool:
        return sweep_record.controller_pid(sweep) is not None

    def cancel(self, sweep: SweepPaths, labels: Sequence[str] | None = None) -> None:
        sweep_record.ask(sweep, "cancel", labels=labels)
