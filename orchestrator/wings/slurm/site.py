"""Checks a cluster's resources with SLURM before points are sent, because sbatch queues jobs that can never run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from orchestrator.config.schema import Device, RunConfig
from orchestrator.config.strict import nearest
from orchestrator.wings.slurm.tools import ask, read_limit_min, rows_of

UNKNOWN = "slurm/unknown"  # nodes that SLURM has not named
SINFO_FIELDS = "%P|%a|%l|%D|%c|%m|%G"


class NodeKind(NamedTuple):
    """Identical nodes of a partition. `gpus`: count by the type name that SLURM uses, "" if the type has no name."""

    partition: str
    is_default: bool
    is_up: bool
    limit_min: float | None
    nodes: int
    cpus: int
    memory_mib: int
    gpus: dict[str, int]


def problems(configs: Iterable[RunConfig]) -> list[str]:
    """Resources that the cluster can never give to these points, with fixes. ClusterError if SLURM does not answer."""
    kinds = _node_kinds()
    found = [problem for config in configs if (problem := problem_of(config, kinds))]
    return list(dict.fromkeys(found))


def _node_kinds() -> list[NodeKind]:
    return read_sinfo(ask(["sinfo", "--noheader", "--exact", "--format", SINFO_FIELDS]))


def read_sinfo(text: str) -> list[NodeKind]:
    """Parses sinfo's output of SINFO_FIELDS."""
    kinds = []
    for name, up, limit, *counts, gres in rows_of(text, len(SINFO_FIELDS.split("|"))):
        # "128+" stands for nodes with different counts, if sinfo was not asked to list them separately.
        nodes, cpus, memory = (int(re.sub(r"\D.*", "", field) or 0) for field in counts)
        default = name.endswith("*")
        kinds.append(
            NodeKind(name.rstrip("*"), default, up == "up", read_limit_min(limit), nodes, cpus, memory, _gpus_of(gres))
        )
    return kinds


def _gpus_of(gres: str) -> dict[str, int]:
    """The count of each GPU type, from "gpu:h100:8(S:0-1),nvme:1" or "gpu:4"."""
    counts: dict[str, int] = {}
    for kind, count in re.findall(r"\bgpu(?::([A-Za-z][\w.\-]*))?:(\d+)", gres):
        counts[kind] = counts.get(kind, 0) + int(count)
    return counts


def problem_of(config: RunConfig, kinds: Sequence[NodeKind]) -> str | None:
    """The first resource that the cluster lacks for this point; None if the point can run."""
    chosen = config.cluster.partition or next((kind.partition for kind in kinds if kind.is_default), None)
    if chosen is None:
        names = sorted({kind.partition for kind in kinds})
        return _partition_problem("null", "this cluster has no default partition", names[:3])
    # A list of partitions is allowed: the job may start in any of them.
    problems = [_problem_in(config, name, kinds) for name in chosen.split(",")]
    return None if None in problems else problems[0]


def _problem_in(config: RunConfig, name: str, kinds: Sequence[NodeKind]) -> str | None:
    own = [kind for kind in kinds if kind.partition == name]
    names = list(dict.fromkeys(kind.partition for kind in kinds))
    if not own:
        near = nearest(name, names)
        fixes = [near] if near else names[:3]
        return _partition_problem(name, f"this cluster has {', '.join(names)}", fixes)
    if not own[0].is_up:
        others = list(dict.fromkeys(kind.partition for kind in kinds if kind.is_up))
        return _partition_problem(name, "it is down", others[:3])
    resources = config.resources
    limit = own[0].limit_min
    if limit is not None and resources.time_limit_min > limit:
        wanted, most = f"resources.time_limit_min={resources.time_limit_min:g}", f"{limit:g}"
        return f"{wanted}: partition {name} allows at most {most}      fix: resources.time_limit_min={most}"
    return _nodes_problem(config, name, own)


def _nodes_problem(config: RunConfig, name: str, own: Sequence[NodeKind]) -> str | None:
    resources = config.resources
    per_node = resources.ranks // resources.nodes
    cpus = per_node * (config.cluster.cpus_per_rank or resources.threads)
    memory_mib = 1024 * (config.cluster.memory_gib or 0)
    total = sum(kind.nodes for kind in own)
    if resources.nodes > total:
        fewer = max(n for n in range(1, total + 1) if resources.ranks % n == 0) if total else 1
        return f"resources.nodes={resources.nodes}: partition {name} has {total}      fix: resources.nodes={fewer}"
    problems = []
    gpus = max(sum(kind.gpus.values()) for kind in own)
    if resources.device is Device.cuda and per_node > gpus:
        problems.append(f"{per_node} GPUs on a node, where nodes have at most {gpus}")
    most_cpus, most_memory = max(kind.cpus for kind in own), max(kind.memory_mib for kind in own)
    if cpus > most_cpus:
        problems.append(f"{cpus} cores on a node, where nodes have at most {most_cpus}")
    if memory_mib > most_memory:
        problems.append(
            f"cluster.memory_gib={config.cluster.memory_gib:g}, where nodes have at most {most_memory / 1024:g}"
        )
    if problems:
        return f"partition {name}: {resources.ranks} ranks on {resources.nodes} nodes ask for {'; '.join(problems)}"
    fitting = [
        kind.nodes
        for kind in own
        if kind.cpus >= cpus
        and kind.memory_mib >= memory_mib
        and (resources.device is not Device.cuda or sum(kind.gpus.values()) >= per_node)
    ]
    if sum(fitting) < resources.nodes:
        return (
            f"resources.nodes={resources.nodes}: partition {name} has {sum(fitting)} nodes with {cpus} cores"
            + (f" and {per_node} GPUs" if resources.device is Device.cuda else "")
            + " each"
        )
    return None


def _partition_problem(name: str, why: str, others: Sequence[str]) -> str:
    fix = "   or   ".join(f"cluster.partition={other}" for other in others)
    return f"cluster.partition={name}: {why}" + (f"      fix: {fix}" if fix else "")


def hardware_name(config: RunConfig) -> str:
    """The name of the hardware in the point's identity: the GPU if the partition has one kind.

    Numbers under one name are comparable. Nodes of a CPU partition, or with mixed GPUs, are named by the partition and
    by `constraint`, which selects nodes of it.
    """
    chosen = config.cluster.partition
    own = [kind for kind in _node_kinds() if kind.partition == chosen or (chosen is None and kind.is_default)]
    types = {name for kind in own for name in kind.gpus}
    if config.resources.device is Device.cuda and len(types) == 1 and "" not in types:
        return f"slurm/{next(iter(types))}"
    return "/".join(filter(None, ["slurm", own[0].partition if own else "", config.cluster.constraint]))
