"""Rules between the cluster and the other groups."""

from __future__ import annotations

from orchestrator.config.cluster import Cluster, ClusterKind
from orchestrator.config.schema import Device, Resources
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene

# A signal may arrive up to EARLY_S before the requested time. A run needs at least WORK_S of work before it.
EARLY_S, WORK_S = 60, 60
EXAMPLE_RANKS = 2


def is_slurm(cluster: Cluster) -> bool:
    return cluster.kind is ClusterKind.slurm


def slurm_is_here(scene: Scene, cluster: Cluster) -> Broken | None:
    if not is_slurm(cluster) or scene.hardware.slurm or scene.plan_only:
        return None
    rule = "cluster=slurm needs SLURM's sbatch on the PATH: type this on a login node, or add --plan"
    return Broken(rule, "none", ("cluster=local",))


def jobs_are_not_sent_from_ranks(scene: Scene, cluster: Cluster) -> Broken | None:
    if not is_slurm(cluster) or scene.world is None:
        return None
    rule = "cluster=slurm sends jobs and starts their ranks itself: run it without torchrun or srun"
    return Broken(rule, f"a world of {scene.world}", ("cluster=local",))


def one_machine_is_one_node(scene: Scene, resources: Resources, cluster: Cluster) -> Broken | None:
    if is_slurm(cluster) or resources.nodes == 1 or scene.world is not None or scene.is_elsewhere(resources):
        return None
    rule = "resources.nodes above 1 needs cluster=slurm: cluster=local is this machine alone"
    return Broken(rule, str(resources.nodes), ("resources.nodes=1",))


def slurm_is_told_what_to_ask_for(scene: Scene, resources: Resources, cluster: Cluster) -> Broken | None:
    """With cluster=slurm the device and the ranks cannot be detected, since another machine does the training."""
    if not is_slurm(cluster) or scene.node.is_described:
        return None
    if resources.device is not Device.auto and resources.ranks is not None:
        return None
    rule = "cluster=slurm needs resources.device and resources.ranks: this machine is not the one that trains"
    ranks = resources.ranks or EXAMPLE_RANKS * resources.nodes
    devices = [resources.device] if resources.device is not Device.auto else [Device.cuda, Device.cpu]
    fixes = tuple(f"resources.device={device} resources.ranks={ranks}" for device in devices)
    return Broken(rule, f"device {resources.device}, ranks {resources.ranks or 'null'}", fixes)


def ranks_spread_over_the_nodes(scene: Scene, resources: Resources) -> Broken | None:
    ranks = resources.ranks
    if ranks is None or ranks % resources.nodes == 0:
        return None
    more = resources.nodes * (ranks // resources.nodes + 1)
    rule = f"resources.ranks must be a multiple of resources.nodes={resources.nodes}"
    alone = () if scene.node.is_described and ranks > scene.hardware.gpus else ("resources.nodes=1",)
    return Broken(rule, str(ranks), (f"resources.ranks={more}", *alone))


def the_limit_leaves_time_before_the_signal(scene: Scene, resources: Resources, cluster: Cluster) -> Broken | None:
    """Otherwise the job would be asked to save as soon as it starts, again after every requeue."""
    least_s = cluster.signal_delay_s + EARLY_S + WORK_S
    if not is_slurm(cluster) or 60 * resources.time_limit_min >= least_s:
        return None
    rule = (
        f"resources.time_limit_min must leave {WORK_S} s of work before the signal to save, which comes "
        f"cluster.signal_delay_s={cluster.signal_delay_s} s before the limit and up to {EARLY_S} s earlier: at least "
        f"{-(-least_s // 60)}"
    )
    fixes = [f"resources.time_limit_min={-(-least_s // 60)}"]
    shorter = int(60 * resources.time_limit_min) - EARLY_S - WORK_S
    if shorter >= 10:
        fixes.append(f"cluster.signal_delay_s={shorter}")
    return Broken(rule, f"{resources.time_limit_min:g}", tuple(fixes))
