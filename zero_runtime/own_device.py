"""Which GPU a rank computes on, and the refusal of ranks that would share one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_runtime.errors import PlanError


def device_index(local_rank: int, count: int) -> int:
    """The index of a rank's GPU among the `count` GPUs that it sees.

    A launcher shows a rank all GPUs of the machine (torchrun: the rank takes the one with its local rank) or its own
    alone (`srun --gpus-per-task=1`). PlanError if there is none, or none for this rank.
    """
    if count == 0:
        raise PlanError(
            "expected a CUDA device for this rank, found none that it can see; look at CUDA_VISIBLE_DEVICES, at what "
            "the launcher requested, and at nvidia-smi"
        )
    if count == 1:
        return 0
    if local_rank >= count:
        raise PlanError(f"LOCAL_RANK={local_rank}: expected a GPU for every rank, found {count}; start fewer ranks")
    return local_rank


def claim_device(store: dist.Store, rank: int, world: int, device: torch.device) -> None:
    """Refuse a GPU that another rank of this world has claimed, and a MIG device in a world of several ranks.

    NCCL cannot join two ranks of one GPU, and reports it only when all of them have come. `store` is that of the
    rendezvous; each rank makes one request. PlanError names both ranks. Does nothing on the CPU or for a single rank.
    """
    if device.type != "cuda" or world == 1:
        return
    facts = torch.cuda.get_device_properties(device)
    if " MIG " in f"{facts.name} ":
        raise PlanError(
            f"rank {rank}: expected an entire GPU for each of {world} ranks, found {facts.name}, a part of one, over "
            "which NCCL cannot communicate; start a single rank"
        )
    owner = store.compare_set(f"devices/{facts.uuid}", "", str(rank)).decode()
    if owner != str(rank):
        raise PlanError(
            f"rank {rank}: expected a GPU that no other rank uses, found {facts.name} {facts.uuid}, which rank {owner} "
            "uses; start as many ranks as the machine has GPUs, or let the launcher give each rank its own "
            "(srun --gpus-per-task=1)"
        )


def make_current(device: torch.device) -> torch.device:
    """Make a GPU the current device of the calling thread; "cuda" without an index is the one that is current already.

    Returns the device with its index. Any other device is returned unchanged.
    """
    if device.type != "cuda":
        return device
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    # CUDA has one current device per thread, GPU 0 at first. Triton launches its kernels there, whatever device their
    # tensors are on, and every call without a device takes memory there.
    torch.cuda.set_device(device)
    return device
