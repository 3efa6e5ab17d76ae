"""Submits points to the SLURM cluster of a test and follows them until they end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.config.cluster import Cluster, ClusterKind
from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.launch.rank import ENTRY
from orchestrator.launch.verdict import Verdict
from orchestrator.records.record_file import EventTail, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.slurm import jobs as slurm
from orchestrator.wings.slurm import verdict as slurm_verdict
from orchestrator.wings.slurm.tools import JobSight, ask, fields_of

OTHERS = Path(__file__).resolve().parents[1] / "orchestrator"  # its points.py, and its worker without torch
sys.path.insert(0, str(OTHERS))

from points import (  # noqa: E402
    STUB,
    config_of,
    make_config,
)

__all__ = [
    "GPUS",
    "STEPS",
    "Sent",
    "config_of",
    "in_slurm",
    "send",
    "stub_config",
    "train",
    "trained",
    "until",
    "variables",
]

STEPS = 20  # one second each if a fault slows them down: time to interrupt the job in the middle
LONG = 75
GPUS = {"gres": "gpu:toy:2"}  # all GPUs of a node


def in_slurm(config: RunConfig, *, ranks: int, nodes: int, limit_min: float = 5.0, **cluster: Any) -> RunConfig:
    where = {"signal_delay_s": 20, "memory_gib": 2.0, **cluster}
    return replace(
        config,
        resources=replace(config.resources, ranks=ranks, nodes=nodes, time_limit_min=limit_min),
        cluster=Cluster(ClusterKind.slurm, **where),
    )


def stub_config(output: Path, *, ranks: int = 1, nodes: int = 1, **settings: Any) -> RunConfig:
    return in_slurm(make_config(output), ranks=ranks, nodes=nodes, **settings)


def trained(steps: int = STEPS, **settings: Any) -> RunConfig:
    """Two ranks on two nodes; a checkpoint is saved when the job is asked to stop, and at the end."""
    return in_slurm(config_of(steps, every=None, resume="none"), ranks=2, nodes=2, **settings)


@dataclass
class Sent:
    """Attempts that were submitted to the cluster in one call."""

    attempts: list[AttemptPaths]
    ids: list[str]
    world: int

    def look(self) -> list[tuple[JobSight, Verdict | None]]:
        sights = slurm.SlurmQueue().look(self.ids)
        pairs = zip(self.attempts, self.ids, strict=True)
        return [(sights[job], slurm_verdict.verdict(attempt, self.world, sights[job])) for attempt, job in pairs]

    def restarts(self) -> int:
        """How often SLURM has requeued the first job."""
        return int(fields_of(ask(["scontrol", "-o", "show", "job", self.ids[0]])).get("Restarts", "0"))

    def ends(self, limit_s: float = 120.0) -> list[Verdict]:
        """Waits until every attempt has a verdict, and returns the verdicts."""
        deadline = time.monotonic() + limit_s
        while True:
            found = self.look()
            verdicts = [verdict for _, verdict in found if verdict is not None]
            if len(verdicts) == len(found):
                return verdicts
            assert time.monotonic() < deadline, f"no verdict after {limit_s:g} s: {found}"
            time.sleep(0.5)

    def curve(self) -> dict[int, float]:
        """Losses of the first attempt, by step."""
        events = EventTail(self.attempts[0].metrics).read_new()
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Sets environment variables, which jobs that are submitted inside the block inherit."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


def send(root: Path, configs: list[RunConfig], entry: str = STUB, **environment: str) -> Sent:
    attempts = [AttemptPaths(root / f"point{number}" / "attempts" / "01") for number in range(len(configs))]
    for attempt, config in zip(attempts, configs, strict=True):
        attempt.root.mkdir(parents=True)
        write_json_atomic(attempt.config, to_dict(config))
    path = os.pathsep.join([str(OTHERS), str(OTHERS.parents[1])])
    with variables(PYTHONPATH=path, **environment):
        ids = slurm.submit(list(zip(attempts, configs, strict=True)), root / "jobs", entry=entry)
    return Sent(attempts, ids, configs[0].resources.ranks or 0)


def train(root: Path, config: RunConfig, **environment: str) -> Sent:
    """Submits one point that really trains."""
    return send(root, [config], ENTRY, **environment)


def until(holds: Callable[[], bool], what: str, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.1)
