"""What the ranks of a configuration will communicate over, without starting them."""

from __future__ import annotations

from orchestrator.config.comm import CommKind
from orchestrator.config.schema import Device, RunConfig
from zero_runtime.wings import SHM_TROUBLE, load

GLOO, NCCL, SHM = "gloo", "nccl", "shm"


def transport(config: RunConfig) -> str:
    """nccl, shm or gloo, as the result of a run will say it.

    Jobs of a cluster are taken to have the permissions of this machine. Ranks on several nodes count as those of gloo,
    though shard groups within one node read each other: what is predicted for them is at least what they need.
    """
    if config.resources.device is Device.cuda:
        return NCCL
    if config.comm.kind is CommKind.gloo or config.ranks == 1 or config.resources.nodes > 1:
        return GLOO
    return SHM if config.comm.kind is CommKind.shm or not load(SHM_TROUBLE)() else GLOO
