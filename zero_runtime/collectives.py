"""The only caller of torch.distributed collectives; every byte that a rank sends is counted here.

[Note: algorithmic volume]
The ledger counts what a ring sends, which is also the least that any algorithm can: an all-gather or reduce-scatter
of P elements over G ranks sends (G-1)/G * P from each rank, an all-reduce twice that. A backend may send more (gloo's
reduce-scatter does); what travels on the wire is the backend's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_runtime.phase_clock import COMMUNICATION, PhaseClock

# torch 2.13 renamed these two and warns at the old names; 2.11 knows only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def join_world(
    init_method: str, rank: int, world: int, device: torch.device, *, timeout: timedelta = timedelta(minutes=10)
) -> None:
    """Become one of `world` ranks: NCCL between GPUs, gloo between CPUs. Blocks until all have come."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def world_size() -> int:
    """Ranks of the default process group; 1 before there is one is an error of ours, not an answer."""
    return dist.get_world_size()


def leave_world() -> None:
    """End this rank's membership."""
    dist.destroy_process_group()


@dataclass
class Volume:
    """What one kind of collective moved from one rank."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, elements: int, element_bytes: int) -> None:
        self.calls += 1
        self.elements += elements
        self.bytes += elements * element_bytes


@dataclass
class Ledger:
    """Volumes since the last `reset`, by kind; control messages (norms, losses, counts) apart."""

    data: dict[str, Volume] = field(default_factory=dict)
    control: Volume = field(default_factory=Volume)

    def record(self, kind: str, elements: int, element_bytes: int) -> None:
        self.data.setdefault(kind, Volume()).add(elements, element_bytes)

    @property
    def data_elements(self) -> int:
        return sum(volume.elements for volume in self.data.values())

    def reset(self) -> Ledger:
        """Start anew; returns what had been counted."""
        counted = Ledger(self.data, self.control)
        self.data, self.control = {}, Volume()
        return counted


class Pending:
    """A collective under way. `wait` makes its result usable, charges the wait to the clock, and may be repeated."""

    def __init__(self, work: dist.Work | None, clock: PhaseClock, then: Callable[[], None] | None = None) -> None:
        self._work = work
        self._clock = clock
        self._then = then

    def wait(self) -> None:
        if self._work is not None:
            with self._clock.phase(COMMUNICATION):
                self._work.wait()
        if self._then is not None:
            self._then()
        self._work = self._then = None


class Collectives:
    """Collectives of one rank: data over the shard group and over the replicas of a shard, control over all.

    A shard group is `shard_count` consecutive ranks, each with a shard of its own; the ranks at the same place in every
    group are replicas of one shard.
    """

    def __init__(self, shard_count: int, clock: PhaseClock) -> None:
        self.world = dist.get_world_size()
        self.rank = dist.get_rank()
        assert self.world % shard_count == 0, f"shard groups of {shard_count} in a world of {self.world}"
        self.shard_count = shard_count
        self.replica_count = self.world // shard_count
        self.replica_rank, self.shard_rank = divmod(self.rank, shard_count)
        self._gather_group, self._reduce_group, self._replica_group = self._make_groups()
        self.ledger = Ledger()
        self._clock = clock

    def free(self) -> None:
        """End the groups that this object made. Idempotent."""
        for group in {self._gather_group, self._reduce_group, self._replica_group} - {None}:
            dist.destroy_process_group(group)
        self._gather_group = self._reduce_group = self._replica_group = None

    def _make_groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """This rank's groups for gathers, for reductions, and of the replicas of its shard; None is the whole world.

        Gathers and reductions have groups of their own: collectives of one group must come in one order on all its
        ranks, and the two kinds interleave differently where a rank leaves parameters unused.
        """
        if self.world == 1:
            return None, None, None
        ranks = range(self.world)
        if self.shard_count == 1:
            return None, None, dist.new_group(list(ranks))
        shards = [list(ranks[start : start + self.shard_count]) for start in ranks[:: self.shard_count]]
        # Every rank must make every group, in the same order.
        gather_groups = [dist.new_group(members) for members in shards]
        reduce_groups = [dist.new_group(members) for members in shards]
        replica_group = None
        if self.replica_count > 1:
            replicas = [list(ranks[place :: self.shard_count]) for place in range(self.shard_count)]
            replica_group = [dist.new_group(members) for members in replicas][self.shard_rank]
        return gather_groups[self.replica_rank], reduce_groups[self.replica_rank], replica_group

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill `full` [P] from every rank's `shard` [S], which may be its own slice of `full`."""
        if self.shard_count == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return Pending(None, self._clock)
        self.ledger.record("all_gather", (self.shard_count - 1) * shard.numel(), shard.element_size())
        with self._clock.phase(COMMUNICATION):
            work = _all_gather(full, shard, group=self._gather_group, async_op=True)
        return Pending(work, self._clock)

    def all_gather_uncounted(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """The same, at once and beside the ledger: for people who look at whole tensors, not for steps."""
        if self.shard_count == 1:
            full.copy_(shard)
        else:
            _all_gather(full, shard.contiguous(), group=self._gather_group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Every rank's `tensor` becomes rank 0's. Beside the ledger."""
        dist.broadcast(tensor, src=0)

    def reduce(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Sum `full` [P] over all ranks into `shard` [S], which may be this rank's slice of `full`.

        Reduce-scatter over the shard group, then all-reduce over the replicas of the shard. `full` is scratch after.
        """
        if self.shard_count == 1:
            if full.data_ptr() != shard.data_ptr():
                shard.copy_(full)
            return self._all_reduce_replicas(shard)
        self.ledger.record("reduce_scatter", (self.shard_count - 1) * shard.numel(), full.element_size())
        with self._clock.phase(COMMUNICATION):
            work = _reduce_scatter(shard, full, op=dist.ReduceOp.SUM, group=self._reduce_group, async_op=True)
        if self.replica_count == 1:
            return Pending(work, self._clock)
        return Pending(work, self._clock, then=lambda: self._all_reduce_replicas(shard).wait())

    def _all_reduce_replicas(self, shard: torch.Tensor) -> Pending:
        if self.replica_count == 1:
            return Pending(None, self._clock)
        elements = 2 * (self.replica_count - 1) * shard.numel() // self.replica_count
        self.ledger.record("all_reduce", elements, shard.element_size())
        with self._clock.phase(COMMUNICATION):
            work = dist.all_reduce(shard, op=dist.ReduceOp.SUM, group=self._replica_group, async_op=True)
        return Pending(work, self._clock)

    def sum_over_ranks_(self, control: torch.Tensor) -> torch.Tensor:
        """Sum a few numbers over all ranks, in place; a control message, counted apart from the data."""
        if self.world > 1:
            elements = 2 * (self.world - 1) * control.numel() // self.world
            self.ledger.control.add(elements, control.element_size())
            with self._clock.phase(COMMUNICATION):
                dist.all_reduce(control, op=dist.ReduceOp.SUM)
        return control

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value` in rank order, on every rank. For reports, not for steps: uncounted."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values
