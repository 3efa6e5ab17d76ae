"""The settings that decide where jobs run: on this machine, or on a SLURM cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.strict import Limits, Word

# Options that the launcher itself passes to sbatch. A second value would contradict the records.
OURS = (
    *("array", "chdir", "error", "export", "job-name", "mem", "nodes", "ntasks"),
    *("ntasks-per-node", "open-mode", "output", "requeue", "signal", "time"),
)
OPTIONS_RULE = f"long names of sbatch's options (not {', '.join(OURS)}) with a text, a number or true"


class ClusterKind(Word):
    local = "local"
    slurm = "slurm"


class ClusterError(RuntimeError):
    """A cluster's tools refused, did not answer or are missing."""


@dataclass(frozen=True)
class Cluster:
    """Where the jobs run.

    `exclusive`: run the points of a sweep one at a time (local), or each on nodes that it does not share (slurm), so
    that no point disturbs the measurements of another. `usd_per_gpu_hour`: the price for the cost estimate of a plan,
    and for the costs of rows on GPUs without hardware.price_per_hour.

    The other keys are for slurm, and null leaves them to the defaults of the site. `partition`, `account`, `qos`,
    `constraint`, `exclude`: as for sbatch. `setup`: shell lines that the job runs before its ranks start, such as
    "module load cuda". `throttle`: the most points of one sweep that run at the same time. `memory_gib`: memory of each
    node. `cpus_per_rank`: null = resources.threads. `signal_delay_s`: seconds before the time limit at which SLURM asks
    the ranks to save; the signal may arrive up to a minute earlier. `additional`: any other option of sbatch, by its
    long name.
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
    """Whether the text is a single line; a second one would become a separate line of the job's script."""
    return bool(text) and text.isprintable()


def _is_option(item: tuple[object, object]) -> bool:
    name, value = item
    named = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9-]+", name) is not None and name not in OURS
    return named and isinstance(value, (str, int, float)) and value is not False and _one_line(str(value))
