"""All torch.distributed collectives of the runtime, with a ledger of the bytes that each rank sends.

[Note: algorithmic volume]
The ledger counts the bytes that a ring algorithm sends, which is also the minimum for any algorithm: an all-gather or
reduce-scatter of P elements over G ranks sends (G-1)/G * P from each rank, an all-reduce twice that. The bytes on the
wire depend on the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zero_runtime.errors import RankError
from zero_runtime.gloo import Messages
from zero_runtime.phase_clock import COMMUNICATION, PhaseClock
from zero_runtime.watch.journal import Journal
from zero_runtime.watch.watch import RankWatch, WatchSettings

# torch 2.13 renamed these two functions and warns about the old names; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Start = Callable[[], Callable[[], Any]]  # issues a collective without blocking; returns a function that waits for it


def _starting(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Start:
    return lambda: collective(*args, **kwargs, async_op=True).wait


@dataclass(frozen=True)
class WorldSettings:
    """How `join_world` sets up a rank.

    timeout: the backend's timeout, for failures that the watch cannot detect. on_end: see RankWatch.
    """

    timeout: timedelta = timedelta(minutes=10)
    watch: WatchSettings = field(default_factory=WatchSettings)
    on_end: Callable[[RankError], None] | None = None


def join_world(
    place: str | Path, rank: int, world: int, device: torch.device, settings: WorldSettings | None = None
) -> RankWatch:
    """Initialize the default process group: NCCL between GPUs, gloo between CPUs. Blocks until all ranks have joined.

    place: the rendezvous: a file that all ranks can write to, or an `init_method` of torch.distributed.
    Returns this rank's watch. Use it as a context manager, so that the other ranks learn how this rank ended, and pass
    it to RuntimeSettings.
    """
    settings = settings or WorldSettings()
    if isinstance(place, Path):  # torch would cut a URL at # or ?, and ranks of other runs may meet at the shorter path
        store = dist.FileStore(str(place), world)
    else:
        store, rank, world = next(dist.rendezvous(place, rank, world, timeout=settings.timeout))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("world", store),
        rank=rank,
        world_size=world,
        timeout=settings.timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return watch_ranks(store, settings)


def watch_ranks(store: dist.Store, settings: WorldSettings | None = None) -> RankWatch:
    """A watch of this rank of the default process group, over a separate connection to `store`."""
    settings = settings or WorldSettings()
    own = dist.PrefixStore("rank_watch", store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs
    return RankWatch(own, dist.get_rank(), dist.get_world_size(), settings.watch, settings.on_end)


def join_alone(device: torch.device) -> None:
    """Initialize a process group of one rank over a store in this process: no port, file or environment variable."""
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


def leave_world() -> None:
    """Destroy the default process group on this rank."""
    dist.destroy_process_group()


@dataclass
class Volume:
    """The calls, elements and bytes that one rank sent with one kind of collective."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, elements: int, element_bytes: int) -> None:
        self.calls += 1
        self.elements += elements
        self.bytes += elements * element_bytes


@dataclass
class Ledger:
    """Volumes since the last `reset`, by kind of collective; control messages (norms, losses, counts) separately."""

    data: dict[str, Volume] = field(default_factory=dict)
    control: Volume = field(default_factory=Volume)

    def record(self, kind: str, elements: int, element_bytes: int) -> None:
        self.data.setdefault(kind, Volume()).add(elements, element_bytes)

    @property
    def data_elements(self) -> int:
        return sum(volume.elements for volume in self.data.values())

    def reset(self) -> Ledger:
        """Restart from zero; returns the volumes counted before."""
        counted = Ledger(self.data, self.control)
        self.data, self.control = {}, Volume()
        return counted


class Pending:
    """A collective under way. `wait` makes its result usable, charges the time to the clock, and may be repeated."""

    def __init__(self, wait: Callable[[], None] | None = None, then: Callable[[], None] | None = None) -> None:
        self._wait, self._then = wait, then

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
        if self._then is not None:
            self._then()
        self._wait = self._then = None


class Collectives:
    """Collectives of one rank: data over its shard group and over the replicas of its shard, control over all ranks.

    A shard group is `shard_count` consecutive ranks, each with a different shard; the ranks at the same position in
    every group are replicas of one shard.
    """

    def __init__(self, shard_count: int, clock: PhaseClock, watch: RankWatch | None = None) -> None:
        self.world = dist.get_world_size()
        self.rank = dist.get_rank()
        assert self.world % shard_count == 0, f"shard groups of {shard_count} in a world of {self.world}"
        self.shard_count = shard_count
        self.replica_count = self.world // shard_count
        self.replica_rank, self.shard_rank = divmod(self.rank, shard_count)
        self._gather_group, self._reduce_group, self._replica_group = self._make_groups()
        self._messages: dict[dist.ProcessGroup | None, Messages] = {}  # by group, for gloo only; see gloo.py
        if self.world > 1 and dist.get_backend() == "gloo":
            groups = (self._gather_group, self._reduce_group, self._replica_group)
            self._messages = {group: Messages(group) for group in groups if group is not None}
        self.ledger = Ledger()
        self._clock = clock
        self._watch = watch
        self.journal = Journal() if watch is None else watch.journal

    def free(self) -> None:
        """Destroy the process groups that this object created. Idempotent."""
        for group in {self._gather_group, self._reduce_group, self._replica_group} - {None}:
            dist.destroy_process_group(group)
        self._gather_group = self._reduce_group = self._replica_group = None
        self._messages.clear()

    def _make_groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """This rank's groups for gathers, for reductions and for the replicas of its shard; None if not needed.

        Gathers and reductions have separate groups: all ranks must issue the collectives of one group in the same
        order, but the two kinds interleave differently on a rank that leaves parameters unused.
        """
        if self.world == 1:
            return None, None, None
        ranks = range(self.world)
        if self.shard_count == 1:
            return None, None, dist.new_group(list(ranks))
        shards = [list(ranks[start : start + self.shard_count]) for start in ranks[:: self.shard_count]]
        # Every rank must call new_group for every group, in the same order.
        gather_groups = [dist.new_group(members) for members in shards]
        reduce_groups = [dist.new_group(members) for members in shards]
        replica_group = None
        if self.replica_count > 1:
            replicas = [list(ranks[place :: self.shard_count]) for place in range(self.shard_count)]
            replica_group = [dist.new_group(members) for members in replicas][self.shard_rank]
        return gather_groups[self.replica_rank], reduce_groups[self.replica_rank], replica_group

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str = "") -> Pending:
        """Fill `full` [P] from every rank's `shard` [S], which may be its own slice of `full`."""
        if self.shard_count == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return Pending()
        self.ledger.record("all_gather", (self.shard_count - 1) * shard.numel(), shard.element_size())
        return Pending(self._issue("all_gather", unit, full, self._gathering(full, shard, self._gather_group)))

    def all_gather_uncounted(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Like `all_gather`, but blocks and is not counted: for inspecting full tensors, not for training steps."""
        if self.shard_count == 1:
            full.copy_(shard)
        else:
            start = self._gathering(full, shard.contiguous(), self._gather_group)
            self._issue("all_gather", "", full, start)()

    def broadcast(self, tensor: torch.Tensor, unit: str = "") -> None:
        """Overwrite every rank's contiguous `tensor`, of any dtype, with rank 0's. Blocks and is not counted."""
        if self.world > 1 and tensor.numel():
            as_bytes = tensor.view(tensor.numel()).view(torch.uint8)  # gloo supports few dtypes
            self._issue("broadcast", unit, tensor, _starting(dist.broadcast, as_bytes, src=0))()

    def reduce(self, full: torch.Tensor, shard: torch.Tensor, unit: str = "") -> Pending:
        """Sum `full` [P] over all ranks into `shard` [S], which may be this rank's slice of `full`.

        Reduce-scatter over the shard group, then all-reduce over the replicas of the shard. The rest of `full` has no
        defined contents afterwards.
        """
        if self.shard_count == 1:
            if full.data_ptr() != shard.data_ptr():
                shard.copy_(full)
            return self._all_reduce_replicas(shard, unit)
        self.ledger.record("reduce_scatter", (self.shard_count - 1) * shard.numel(), full.element_size())
        wait = self._issue("reduce_scatter", unit, full, self._summing(shard, full, self._reduce_group))
        if self.replica_count == 1:
            return Pending(wait)
        # The all-reduce needs the result of the reduce-scatter, so it starts only in the caller's wait.
        return Pending(wait, then=lambda: self._all_reduce_replicas(shard, unit).wait())

    def _all_reduce_replicas(self, shard: torch.Tensor, unit: str) -> Pending:
        if self.replica_count == 1:
            return Pending()
        elements = 2 * (self.replica_count - 1) * shard.numel() // self.replica_count
        self.ledger.record("all_reduce", elements, shard.element_size())
        group = self._replica_group
        if group not in self._messages:
            start = _starting(dist.all_reduce, shard, op=dist.ReduceOp.SUM, group=group)
            return Pending(self._issue("all_reduce", unit, shard, start))
        # Over gloo: a reduce-scatter and an all-gather by messages, whose sums are in rank order (see gloo.py).
        own = shard.chunk(self.replica_count)[self.replica_rank]
        wait = self._issue("all_reduce", unit, shard, self._summing(own, shard, group))
        return Pending(wait, then=lambda: self._issue("all_reduce", unit, shard, self._gathering(shard, own, group))())

    def _gathering(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None) -> Start:
        if group in self._messages:
            return partial(self._messages[group].all_gather, full, shard)
        return _starting(_all_gather, full, shard, group=group)

    def _summing(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None) -> Start:
        if group in self._messages:
            return partial(self._messages[group].reduce_scatter, shard, full)
        return _starting(_reduce_scatter, shard, full, op=dist.ReduceOp.SUM, group=group)

    def sum_over_ranks_(self, control: torch.Tensor) -> torch.Tensor:
        """Sum a few numbers over all ranks in place. Blocks; counted as a control message, not as data."""
        if self.world > 1:
            elements = 2 * (self.world - 1) * control.numel() // self.world
            self.ledger.control.add(elements, control.element_size())
            self._issue("control_sum", "", control, _starting(dist.all_reduce, control, op=dist.ReduceOp.SUM))()
        return control

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value` in rank order, on every rank. Not counted: for reports, not for steps."""
        values: list[Any] = [None] * self.world
        sequence = self.journal.issue("gather_objects", "", 0, "object")
        self._blocking(sequence, partial(dist.all_gather_object, values, value))
        return values

    # ---- ranks that differ -------------------------------------------------------------------------------------

    def fingerprint(self) -> torch.Tensor:
        """This rank's fingerprint of the collectives issued so far, and its square: [2] fp64 on the CPU.

        Sum it over the ranks and pass the two sums to `check_fingerprints`.
        """
        value = self.journal.fingerprint()
        return torch.tensor([value, value * value], dtype=torch.float64)

    def check_fingerprints(self, total: float, squares: float) -> None:
        """Raise the same RankError on every rank if the sums over the ranks show that the fingerprints differ.

        world * sum of squares = square of the sum only if all fingerprints are equal (Cauchy-Schwarz); the sums are
        exact, see `Journal.fingerprint`. Without this check, different collectives may silently give wrong numbers:
        gloo sums 8 fp32 values with 4 fp64 values without an error. A no-op without a watch, because only the watch can
        name the ranks that differ.
        """
        if self._watch is None or (math.isfinite(squares) and self.world * int(squares) == int(total) ** 2):
            return
        self._explain("the ranks issued different collectives in this step", None)

    def _issue(self, kind: str, unit: str, tensor: torch.Tensor, start: Start) -> Callable[[], None]:
        """Start a collective and return the function that waits for it; both charge their time to the clock.

        tensor: the collective's larger tensor, by whose size and dtype the journal records it.
        """
        sequence = self.journal.issue(kind, unit, tensor.numel(), tensor.dtype)
        with self._clock.phase(COMMUNICATION):
            try:
                wait = start()
            except RuntimeError as error:
                self._explain(f"{kind} of unit {unit!r} could not start: {error}", error)
        return partial(self._blocking, sequence, wait)

    def _blocking(self, sequence: int, wait: Callable[[], Any]) -> None:
        """Wait for the collective with this number in the journal. A backend error is raised as a RankError."""
        self.journal.wait(sequence)
        with self._clock.phase(COMMUNICATION):
            try:
                wait()
            except RuntimeError as error:
                self._explain(f"collective {sequence} failed: {error}", error)
        self.journal.wait(0)

    def _explain(self, trouble: str, error: RuntimeError | None) -> NoReturn:
        # With a watch, all ranks raise the same RankError. Without one, this rank can only report its own error.
        if self._watch is not None:
            self._watch.explain(trouble, error)
        raise RankError(f"rank {self.rank}: {trouble}; join_world's watch names the culprit", (self.rank,)) from error
