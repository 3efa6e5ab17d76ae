"""The memory of the machines that a point runs on, or that a plan describes. Pure: what is read here is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.cluster import ClusterKind
from orchestrator.config.schema import Device, RunConfig


@dataclass(frozen=True)
class Target:
    """The nodes of a point, which are all alike; bytes are None if they are not known.

    device_bytes: the memory that ranks allocate from. On a GPU it is all that CUDA can allocate there for one rank;
    what CUDA, NCCL and cuBLAS take of it is not subtracted (predict/memory/device_overhead.py). On a CPU it is
    host memory. ranks_share: the number of ranks that share device_bytes. host_bytes: host memory of a node.
    """

    device: Device
    device_bytes: int | None
    ranks_share: int
    host_bytes: int | None
    ranks_per_node: int


def target_of(config: RunConfig, gpu_bytes: int | None = None, host_bytes: int | None = None) -> Target:
    """The target of a resolved configuration.

    gpu_bytes, host_bytes: memory of a GPU of this machine and of its host, used if the hardware is not described.
    """
    resources, node = config.resources, config.hardware
    ranks, on_gpus = resources.ranks, resources.device is Device.cuda
    if node.is_described:
        gpu_bytes, host_bytes = node.memory_bytes, node.host_bytes
    elif config.cluster.kind is ClusterKind.slurm:
        gpu_bytes = host_bytes = None  # the memory of the cluster's nodes is not known here
    device_bytes, per_node = gpu_bytes if on_gpus else host_bytes, ranks // resources.nodes
    own = resources.memory_mib and resources.memory_mib << 20
    return Target(
        device=resources.device,
        device_bytes=own or device_bytes,
        ranks_share=1 if on_gpus or own or device_bytes is None else per_node,
        host_bytes=host_bytes,
        ranks_per_node=per_node,
    )
