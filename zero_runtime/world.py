"""Joining and leaving the world of all ranks, its sizes, and the groups of ranks within it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from zero_runtime.errors import PlanError, RankError
from zero_runtime.own_device import claim_device, make_current
from zero_runtime.watch.watch import RankWatch, WatchSettings
from zero_runtime.wings import REGISTER_SHM, SHM_REASON, load

SHM = "shm"  # the backend of CPU ranks that read each other's memory, see same_host/
ON_HOST = ("gloo", SHM)  # backends in which the host waits


@dataclass(frozen=True)
class WorldSettings:
    """How `join_world` sets up a rank.

    timeout: the backend's timeout, for failures that the watch cannot detect. on_end: see RankWatch. comm: "gloo"
    between CPUs, "shm" to read each other's memory or fail, "auto" to do so among the ranks of one host and use gloo
    otherwise.
    """

    timeout: timedelta = timedelta(minutes=10)
    watch: WatchSettings = field(default_factory=WatchSettings)
    on_end: Callable[[RankError], None] | None = None
    comm: str = "auto"


def join_world(
    place: str | Path, rank: int, world: int, device: torch.device, settings: WorldSettings | None = None
) -> RankWatch:
    """Initialize the default process group: NCCL between GPUs, and see `WorldSettings.comm` between CPUs. Blocks until
    all ranks have joined.

    place: the rendezvous: a file that all ranks can write to, or an `init_method` of torch.distributed.
    Returns this rank's watch. Use it as a context manager, so that the other ranks learn how this rank ended, and pass
    it to RuntimeSettings.
    """
    settings = settings or WorldSettings()
    device = make_current(device)
    if device.type == "cuda":
        _launch_in_host_order()
    else:
        _let_senders_finish()
    if isinstance(place, Path):  # torch would cut a URL at # or ?, and ranks of other runs may meet at the shorter path
        store = dist.FileStore(str(place), world)
    else:
        store, rank, world = next(dist.rendezvous(place, rank, world, timeout=settings.timeout))
    claim_device(store, rank, world, device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else cpu_backend(settings.comm, world),
        store=dist.PrefixStore("world", store),
        rank=rank,
        world_size=world,
        timeout=settings.timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if settings.comm == SHM and (reason := load(SHM_REASON)()):
        raise RankError(f"comm=shm: {reason}; comm=auto uses gloo there", ())
    return watch_ranks(store, settings)


def cpu_backend(comm: str, world: int) -> str:
    """The backend for so many CPU ranks, known to torch."""
    if comm == "gloo" or world == 1:
        return "gloo"
    load(REGISTER_SHM)()
    return SHM


def transport() -> tuple[str, str]:
    """What the ranks of the default group communicate over: nccl, gloo or shm. With gloo, why they do not read each
    other's memory; empty if nobody asked for it."""
    backend = str(dist.get_backend())
    reason = load(SHM_REASON)() if backend == SHM else ""
    return ("gloo" if reason else backend), reason


def watch_ranks(store: dist.Store, settings: WorldSettings | None = None) -> RankWatch:
    """A watch of this rank of the default process group, over a separate connection to `store`."""
    settings = settings or WorldSettings()
    clone = cast(Any, store).clone()  # torch 2.14 declares it, 2.13 does not
    own = dist.PrefixStore("rank_watch", clone)
    return RankWatch(own, dist.get_rank(), dist.get_world_size(), settings.watch, settings.on_end)


def join_alone(device: torch.device) -> None:
    """Initialize a process group of one rank over a store in this process: no port, file or environment variable."""
    device = make_current(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=device if device.type == "cuda" else None,
    )


def watch_world() -> RankWatch | None:
    """A watch of the default process group, over the group's own store; None for a world of one.

    The group may have been initialized by other code. Every rank must call this equally often and in the same order.
    The caller closes the watch.
    """
    if dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()  # no public function returns the store of an existing group
    place = store.add(f"zero_runtime/watches/{dist.get_rank()}", 1)
    return watch_ranks(dist.PrefixStore(f"zero_runtime/{place}", store))


def is_joined() -> bool:
    """Whether the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """This rank of the default process group, which must exist."""
    return dist.get_rank()


def world_size() -> int:
    """Number of ranks of the default process group; without a group this raises instead of returning 1."""
    return dist.get_world_size()


def own_node() -> int:
    """The rank of the first process of this machine, from which LOCAL_RANK counts."""
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0" if world_size() == 1 else ""))
    if not local:
        raise PlanError("a folder for each node: expected LOCAL_RANK, found none; start the ranks with torchrun")
    return own_rank() - int(local)


def _launch_in_host_order() -> None:
    """Let NCCL start the kernels of all communicators in the order in which the host issues them.

    Gathers and reductions are under way together on two communicators. If the devices had room for one kernel only and
    two ranks started different ones, neither could end. NCCL reads the variable at its first launch.
    """
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def _let_senders_finish() -> None:
    """Put this thread, and those that it starts from now on, into Linux's batch class: waking, they preempt no thread.

    In the normal class, a thread of gloo that wakes preempts the thread that holds the lock it needs, in the middle of
    a send, and retries to take the lock until its time slice ends. Ranks that share their cores with other processes
    lose nothing by it (benchmarks/batch_class.py). A no-op elsewhere, and where the caller chose another class.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a sandbox may forbid the call; the rank is then slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def leave_world() -> None:
    """Destroy the default process group and all others. Only for ranks that succeeded: see [Note: failed ranks]."""
    dist.destroy_process_group()


def _fails_on_nccl() -> bool:
    """Whether this rank handles an error, as an `except` or a `finally` does, and its groups are NCCL communicators.

    [Note: failed ranks]
    The destruction of a NCCL communicator is collective and waits for its kernels: a failed rank that destroys one may
    wait forever for ranks that never come to it, before its error is shown or recorded. So a failed rank leaves its
    communicators as they are and ends its process, which releases them. Other backends destroy a group on each rank
    separately.
    """
    return dist.get_backend() == "nccl" and sys.exc_info()[0] is not None


class RankGroups(NamedTuple):
    """The process groups of one rank: for gathers, for reductions, for the replicas of its shard, for the slices of its
    layers, for the parts of its sequences, and for gathers across the shard groups.

    None if not needed. Gathers and reductions have separate groups: all ranks must issue the collectives of one group
    in the same order, but the two kinds interleave differently on a rank that leaves parameters unused. Gathers over
    all ranks do not use the default group either, which would save a communicator: its messages, the runtime's sums and
    any that the program sends itself, would wait for the prefetched gathers that were issued before them.
    """

    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None
    outer: dist.ProcessGroup | None = None

    @classmethod
    def make(
        cls, shard_count: int, tensor_degree: int = 1, sequence_degree: int = 1, *, gathers_across: bool = False
    ) -> RankGroups:
        """Create the groups for shard groups of `shard_count` consecutive ranks. Every rank must call it.

        With tensor parallelism, `tensor_degree` consecutive ranks hold the slices of one model, and the shard groups
        and replicas are among the ranks that hold the same slice. With sequence parallelism, `sequence_degree`
        consecutive ones of these hold the parts of the same sequences. gathers_across: the ranks at the same position
        of all shard groups gather from each other too, which is separate from their reductions.
        """
        world = dist.get_world_size()
        data_world = world // tensor_degree
        assert data_world * tensor_degree == world, f"tensor groups of {tensor_degree} in a world of {world}"
        assert data_world % shard_count == 0, f"shard groups of {shard_count} in a world of {data_world}"
        assert data_world % sequence_degree == 0, f"parts of {sequence_degree} in a world of {data_world}"
        if world == 1:
            return cls()
        if dist.get_backend() == "nccl":
            _launch_in_host_order()  # another program may have made the default group
        # In this order on every rank, and destroyed in the reverse one.
        axes = [range(slice_rank, world, tensor_degree) for slice_rank in range(tensor_degree)]
        gather = reduce = replica = tensor = sequence = outer = None
        if shard_count > 1:
            starts = range(0, data_world, shard_count)
            shards = [axis[start : start + shard_count] for axis in axes for start in starts]
            gather, reduce = _divide(shards), _divide(shards)
        across = [axis[place::shard_count] for axis in axes for place in range(shard_count)]
        if shard_count < data_world:
            replica = _divide(across)
        if tensor_degree > 1:
            tensor = _divide([range(start, start + tensor_degree) for start in range(0, world, tensor_degree)])
        if sequence_degree > 1:
            starts = range(0, data_world, sequence_degree)
            sequence = _divide([axis[start : start + sequence_degree] for axis in axes for start in starts])
        if shard_count < data_world and gathers_across:
            outer = _divide(across)
        return cls(gather, reduce, replica, tensor, sequence, outer)

    def destroy(self) -> None:
        """Destroy the groups, on every rank in the same order: the reverse of making.

        A no-op on a rank that handles an error with NCCL, see [Note: failed ranks].
        """
        groups = [group for group in reversed(self) if group is not None]
        if not groups or _fails_on_nccl():
            return
        for group in groups:
            dist.destroy_process_group(group)


def _divide(partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's group of a partition of all ranks. Every rank must call it, in the same order.

    NCCL divides a communicator that is bound to a device in one call; the other backends make the groups one by one.
    """
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend() == "nccl" and world.bound_device_id is not None:
        group = dist.split_group(split_ranks=[list(members) for members in partition], pg_options=_nccl_options())
        return cast(dist.ProcessGroup, group)  # torch returns something else only to ranks outside the partition
    options = _nccl_options() if dist.get_backend() == "nccl" else None
    groups = [dist.new_group(list(members), pg_options=options) for members in partition]
    (own,) = (index for index, members in enumerate(partition) if dist.get_rank() in members)
    return cast(dist.ProcessGroup, groups[own])


def _nccl_options() -> Any:
    """New options for one call, which changes them: the kernels of the group are scheduled before those of the model.

    With equal priorities a collective's few blocks would wait for the thousands of blocks of a matrix multiplication.
    """
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
