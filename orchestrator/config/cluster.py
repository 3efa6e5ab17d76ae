"""Where jobs are sent: this machine, or a cluster with what its scheduler is told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.strict import Limits, Word

# What the launcher itself says to sbatch: saying it twice would contradict what the records hold.
OURS = (
    *("array", "chdir", "error", "export", "job-name", "mem", "nodes", "ntasks"),
    *("ntasks-per-node", "open-mode", "output", "requeue", "signal", "time"),
)
OPTIONS_RULE = f"long names of sbatch's options (not {', '.join(OURS)}) with a text, a number or true"


class ClusterKind(Word):
    local = "local"
    slurm = "slurm"


@dataclass(frozen=True)
class Cluster:
    """Where the jobs are sent. exclusive: one point of a sweep at a time, or on nodes of its own, so that none disturbs
    another's numbers. The rest is for slurm; null leaves a choice to the site's defaults.

    setup: shell lines of the job before its ranks start ("module load cuda"). throttle: points of one sweep that run
    at once. memory_gib: of each node. cpus_per_rank: null = resources.threads. signal_delay_s: how long before the time
    limit SLURM asks the ranks to save; sites may send the signal up to a minute earlier. usd_per_gpu_hour: for the cost
    that a plan tells. additional: any other option of sbatch, by its long name.
    """

    kind: ClusterKind = ClusterKind.local
    exclusive: bool = False
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    setup: list[str] = field(default_factory=list)
    throttle: int | None = None
    memory_gib: float | None = None
    cpus_per_rank: int | None = None
    signal_delay_s: int = 90
    usd_per_gpu_hour: float | None = None
    additional: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "cluster")
        for key in ("partition", "account", "qos", "constraint", "exclude"):
            limits.must(key, _one_line, "one line of text, or null", None)
        limits.at_least(1, throttle=None, cpus_per_rank=None)
        limits.at_least(10, signal_delay_s=90)
        limits.must("memory_gib", lambda value: value > 0, "above 0, or null", None)
        limits.must("usd_per_gpu_hour", lambda value: value >= 0, "at least 0, or null", None)
        limits.must("setup", lambda lines: all(map(_one_line, lines)), "a list of single lines", "[]")
        limits.must("additional", lambda found: all(map(_is_option, found.items())), OPTIONS_RULE, "{}")
        limits.conclude()


def _one_line(text: str) -> bool:
    """A second line would be a line of its own in the job's script."""
    return bool(text) and text.isprintable()


def _is_option(item: tuple[object, object]) -> bool:
    name, value = item
    named = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9-]+", name) is not None and name not in OURS
    return named and isinstance(value, (str, int, float)) and value is not False and _one_line(str(value))
