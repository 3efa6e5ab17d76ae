"""Rules between how CPU ranks communicate and the other groups."""

from __future__ import annotations

from orchestrator.config.cluster import Cluster
from orchestrator.config.comm import Comm, CommKind
from orchestrator.config.schema import Device, Resources
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.cluster import is_slurm
from orchestrator.planning.rules.scene import Scene
from zero_runtime.wings import SHM_TROUBLE, load

AUTO = "comm=auto"


def comm_is_of_cpu_ranks(scene: Scene, comm: Comm, resources: Resources) -> Broken | None:
    if comm.kind is CommKind.auto or scene.device(resources) is not Device.cuda:
        return None
    return Broken(f"comm={comm.kind} is for ranks on CPUs: GPUs use NCCL", "cuda", (AUTO, "resources.device=cpu"))


def ranks_that_read_each_other_share_a_node(scene: Scene, comm: Comm, resources: Resources) -> Broken | None:
    nodes = scene.nodes(resources)
    if comm.kind is not CommKind.shm or nodes == 1 or scene.device(resources) is Device.cuda:
        return None
    alone = ("resources.nodes=1",) if scene.world is None else ()
    return Broken("comm=shm is for ranks of one node, which have one memory", f"{nodes} nodes", (AUTO, *alone))


def ranks_may_read_each_other(scene: Scene, comm: Comm, resources: Resources, cluster: Cluster) -> Broken | None:
    """By trying it, where the ranks will run."""
    is_here = not (is_slurm(cluster) or scene.is_elsewhere(resources))
    if comm.kind is not CommKind.shm or not is_here or scene.ranks(resources) == 1:
        return None
    if scene.device(resources) is Device.cuda or not (reason := load(SHM_TROUBLE)()):
        return None
    return Broken("comm=shm needs ranks that may read each other's memory", reason, (AUTO, "comm=gloo"))
