"""Rules between the hardware that is described and the other groups; with hardware=auto none of them applies."""

from __future__ import annotations

import math

from orchestrator.config.cluster import Cluster
from orchestrator.config.hardware import GpuNode
from orchestrator.config.schema import Device, Resources
from orchestrator.config.state_groups import Precision
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.cluster import is_slurm
from orchestrator.planning.rules.precision import computed_in
from orchestrator.planning.rules.scene import Scene

USUAL_GPUS = 8  # most GPUs of a node that a fix proposes


def described_gpus_are_used(scene: Scene, resources: Resources, hardware: GpuNode) -> Broken | None:
    if not hardware.is_described or resources.device is not Device.cpu:
        return None
    rule = f"hardware={hardware.name} describes GPUs, which resources.device must use"
    return Broken(rule, "cpu", ("resources.device=cuda", "hardware=auto"))


def a_run_has_the_described_gpus(
    scene: Scene, resources: Resources, cluster: Cluster, hardware: GpuNode
) -> Broken | None:
    """A plan needs no GPU here, and the jobs of a cluster run elsewhere. Any other run needs the GPUs that it names."""
    scene = scene.on(hardware)
    if not scene.lacks_its_gpus(resources) or scene.plan_only or is_slurm(cluster):
        return None
    if resources.device is Device.cpu:  # reported by the rule above
        return None
    machine = scene.machine
    found = f"{machine.gpus} x {machine.gpu}" if machine.gpus else "no GPU"
    rule = (
        f"hardware={hardware.name} needs {scene.ranks_here(resources)} x {scene.hardware.gpu} here to run; "
        "add --plan to predict without them"
    )
    return Broken(rule, found, (_for_this_machine(scene, resources),))


def _for_this_machine(scene: Scene, resources: Resources) -> str:
    """Overrides with which the resources are those of this machine."""
    gpus, same = scene.machine.gpus, scene.machine.gpu == scene.hardware.gpu and scene.world is None
    words = [] if same else ["hardware=auto"]
    if same and resources.ranks is None:
        words.append(f"hardware.gpus={gpus}")
    if gpus and (resources.ranks or 0) > gpus and scene.world is None:
        words.append(f"resources.ranks={gpus}")
    if resources.device is Device.cuda and not gpus:
        words.append("resources.device=cpu")
    if resources.nodes > 1 and scene.world is None:
        words.append("resources.nodes=1")
    return " ".join(words)


def each_rank_has_a_described_gpu(
    scene: Scene, resources: Resources, cluster: Cluster, hardware: GpuNode
) -> Broken | None:
    if not hardware.is_described:
        return None
    ranks, gpus, nodes = scene.on(hardware).ranks(resources), hardware.gpus or 1, resources.nodes
    if ranks <= gpus * nodes:
        return None
    fixes = [f"resources.ranks={gpus * nodes}"] if scene.world is None else []
    if (per_node := math.ceil(ranks / nodes)) <= USUAL_GPUS:
        fixes.append(f"hardware.gpus={per_node}")
    if scene.plan_only or scene.world is not None or is_slurm(cluster):
        more = next(count for count in range(nodes, ranks + 1) if ranks % count == 0 and ranks <= gpus * count)
        fixes.append(f"resources.nodes={more}")
    rule = f"resources.ranks must be at most the GPUs of hardware={hardware.name}, {gpus} x {nodes} nodes"
    return Broken(rule, str(ranks), tuple(fixes))


def the_gpu_has_the_dtype(scene: Scene, precision: Precision, resources: Resources, hardware: GpuNode) -> Broken | None:
    """Without matrix instructions for a dtype, products in it are slower than in fp32."""
    if not hardware.is_described or resources.device is Device.cpu:
        return None
    dtype = computed_in(precision, scene.on(hardware), resources)
    if dtype == "fp32" and precision.tf32 and hardware.lacks("tf32"):
        return Broken(f"hardware={hardware.name} has no TF32", "precision.tf32=true", ("precision.tf32=false",))
    if not hardware.lacks(dtype):
        return None
    other = ("precision=fp16",) if precision.compute == "auto" and not hardware.lacks("fp16") else ()
    key = "param" if precision.compute == "auto" else "compute"
    rule = f"hardware={hardware.name} has no matrix instructions for {dtype}"
    return Broken(rule, f"precision.{key}={dtype}", (*other, "precision.compute=fp32"))
