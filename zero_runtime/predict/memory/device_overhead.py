"""Memory of a GPU that libraries take in addition to torch's tensors: an allowance for predictions, not a count.

No GPU has confirmed these figures here. Each is the range of published measurements, for one process on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
# The driver's context of a process: 534 MiB in meta-pytorch/torchcomms#777; the range is of data-center GPUs.
CONTEXT = (400 * MIB, 600 * MIB)
# Buffers and channels of one NCCL communicator between GPUs of one node with NVLink (NVIDIA/nccl#964, #864). Without
# NVLink, and between two GPUs, there are fewer channels, which take less.
COMMUNICATOR = (500 * MIB, 700 * MIB)
# torch gives each of its two cuBLAS handles (of the main thread, and of autograd's) a workspace of 32 MiB on compute
# capability 9.0 (aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`).
WORKSPACES = 2 * 32 * MIB


@dataclass(frozen=True)
class DeviceOverhead:
    """Bytes of one rank's GPU outside of the model's tensors, at least and at most. Zero on a CPU."""

    communicators: int = 0
    least: int = 0
    most: int = 0

    @classmethod
    def on_cuda(
        cls, world: int, shard_count: int, tp: int = 1, sp: int = 1, *, gathers_across: bool = False
    ) -> DeviceOverhead:
        """The context, cuBLAS's workspaces, and NCCL's buffers of each communicator of a rank."""
        count = communicators(world, shard_count, tp, sp, gathers_across=gathers_across)
        least, most = (
            context + count * communicator + WORKSPACES
            for context, communicator in zip(CONTEXT, COMMUNICATOR, strict=True)
        )
        return cls(count, least, most)


NO_OVERHEAD = DeviceOverhead()


def communicators(world: int, shard_count: int, tp: int = 1, sp: int = 1, *, gathers_across: bool = False) -> int:
    """The number of communicators that a rank holds: the world's, and those of `RankGroups`. None for a single rank.

    shard_count: ranks of a shard group. gathers_across: shard groups exchange parameters. tp, sp: the degrees of tensor
    and sequence parallelism, which divide the ranks.
    """
    if world == 1:
        return 0
    sharded = 2 if shard_count > 1 else 0  # gathers and reductions
    across = (1 + gathers_across) * (shard_count < world // tp)  # the replicas of a shard
    # The slices of layers; the parts of sequences.
    return 1 + sharded + across + (tp > 1) + (sp > 1)
