"""All collectives of the runtime, written to the journal, timed and, if they move data, counted in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from zero_runtime.gloo import messages_over
from zero_runtime.issuing import CollectiveIssuer, Start, Started
from zero_runtime.ledger import Ledger
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.watch.watch import RankWatch
from zero_runtime.world import ON_HOST, RankGroups

# torch 2.13 renamed these two functions and warns about the old names; 2.12 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Wait = Callable[[], Any]  # lets the current stream wait for a collective, or the host where none is


def _starting(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Start:
    def start() -> Started:
        work = collective(*args, **kwargs, async_op=True)
        return Started(work.wait, work.is_completed)

    return start


def _sending(message: Callable[..., Callable[[], None]], *tensors: torch.Tensor | Sequence[torch.Tensor]) -> Start:
    return lambda: Started(message(*tensors))


def _on_cuda(tensor: torch.Tensor) -> bool:
    """Whether collectives of the tensor run on a device, behind a stream, while the host goes on."""
    return tensor.is_cuda


class Pending:
    """A collective under way. `wait` makes its result usable, charges the time to the clock, and may be repeated.

    held: tensors that the collective uses and that must not be freed before the caller's stream waits for it.
    """

    def __init__(
        self,
        wait: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        held: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self._wait, self._then, self._held = wait, then, held

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
        if self._then is not None:
            self._then()
        self._wait = self._then = None
        self._held = ()


class Collectives(CollectiveIssuer):
    """Collectives of one rank: data over its shard group and over the replicas of its shard, control over all ranks.

    A shard group is `shard_count` consecutive ranks, each with a different shard; the ranks at the same position in
    every group are replicas of one shard. With tensor parallelism, `tensor_degree` consecutive ranks hold the slices of
    one model and compute on the same batch; ranks are then counted along the data axis, which holds every
    `tensor_degree`-th rank, and `data_world` is its size. With sequence parallelism, `sequence_degree` consecutive
    ranks of the data axis hold the parts of the same sequences, so there are `batch_world` different batches.

    Outer sharding: with `group_ranks` G below `shard_count`, which is then `data_world` N, a shard group is G
    consecutive ranks, and each of the N/G groups holds all parameters. The ranks at one position of all groups hold the
    same G-th of a unit, of which each owns one part, a shard of N.
    """

    def __init__(
        self,
        shard_count: int,
        clock: PhaseClock,
        watch: RankWatch | None = None,
        *,
        tensor_degree: int = 1,
        sequence_degree: int = 1,
        group_ranks: int | None = None,
    ) -> None:
        super().__init__(
            dist.get_rank(), dist.get_world_size(), clock, watch, waits_on_host=dist.get_backend() in ON_HOST
        )
        self.tensor_degree = tensor_degree
        self.data_world = self.world // tensor_degree
        self.data_rank, self.tensor_rank = divmod(self.rank, tensor_degree)
        self.sequence_degree = sequence_degree
        self.batch_world = self.data_world // sequence_degree
        self.batch_rank, self.sequence_rank = divmod(self.data_rank, sequence_degree)
        self.shard_count = shard_count
        self.replica_count = self.data_world // shard_count
        self.replica_rank, self.shard_rank = divmod(self.data_rank, shard_count)
        self.group_ranks = group_ranks or shard_count
        self.group_count = self.data_world // self.group_ranks
        self.group, self._group_place = divmod(self.data_rank, self.group_ranks)
        self._shards_across = self.group_ranks < shard_count
        if self._shards_across:
            assert shard_count == self.data_world, "outer sharding is over all ranks of the data axis"
            # The shards of the ranks at one position are consecutive, so what these ranks hold is gathered in place.
            self.shard_rank = self._group_place * self.group_count + self.group
        self.groups = RankGroups.make(
            self.group_ranks, tensor_degree, sequence_degree, gathers_across=self._shards_across
        )
        self._messages: dict[dist.ProcessGroup | None, Any] = {}  # by group, of CPU ranks only; see gloo.py
        if self.world > 1 and dist.get_backend() in ON_HOST:
            self._messages = {group: messages_over(group) for group in self.groups if group is not None}
        # Whether a reduction allocates nothing. (NCCL's streams need no other order of waits.)
        self.sums_in_place = bool(self._messages) and not any(one.holds_terms for one in self._messages.values())
        self.places: dict[str, int] = {}  # of the units by name, from 1, the same on all ranks; see gloo.py
        self._side_streams: dict[str, torch.cuda.Stream] = {}  # see `_behind`
        self.ledger = Ledger()

    def holds_shard_of(self, rank: int) -> bool:
        """Whether another rank, or this one, holds the same shards as this rank."""
        data_rank, tensor_rank = divmod(rank, self.tensor_degree)
        return (data_rank - self.data_rank) % self.shard_count == 0 and tensor_rank == self.tensor_rank

    def free(self) -> None:
        """Destroy the process groups that this object created; all ranks must call it together. Idempotent."""
        if self._progress is not None:
            self._progress.forget()
        self.groups.destroy()
        self.groups = RankGroups()
        self._messages.clear()

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        unit: str = "",
        *,
        lasting: bool = True,
        after: Pending | None = None,
    ) -> Pending:
        """Fill `full` [P] from the `shard` [P / G] of every rank of the shard group, which may be its own slice of it.

        lasting: `full` is not a temporary tensor, so the watch may hold it until the device has completed the gather.
        after: the gather that fills `shard`. A host that must wait for it starts this gather when it waits for that.
        """
        if self.group_ranks == 1:
            if after is not None:
                after.wait()
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return Pending()
        if after is not None and not _on_cuda(full):
            return Pending(after.wait, then=lambda: self.all_gather(full, shard, unit, lasting=lasting).wait())
        self.ledger.record("all_gather", unit, (self.group_ranks - 1) * shard.numel(), shard.dtype)
        start = self.all_gather_over(full, shard, self.groups.gather, self.places.get(unit, 0))
        if after is not None:
            start = self._behind("gather", after.wait, start, full.device)
        return Pending(self.issue("all_gather", unit, full, start, polled=lasting))

    def gather_across(self, held: torch.Tensor, shard: torch.Tensor, unit: str = "") -> Pending:
        """Fill `held` [P / G] from the `shard` [P / N] of every rank at this position of a shard group, which is that
        rank's slice of it with outer sharding."""
        self.ledger.record("outer_all_gather", unit, (self.group_count - 1) * shard.numel(), shard.dtype)
        start = self.all_gather_over(held, shard, self.groups.outer, self.places.get(unit, 0))
        return Pending(self.issue("outer_all_gather", unit, held, start, polled=True))

    def held_part(self, full: torch.Tensor) -> torch.Tensor:
        """The elements [P / G] of `full` [P] that the ranks at this position of all shard groups have; a view."""
        return full.chunk(self.group_ranks)[self._group_place]

    def all_gather_uncounted(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill `full` [P] from every rank's `shard` [S]. Blocks and is not counted: for inspecting full tensors, not
        for training steps."""
        shard = shard.contiguous()
        if self._shards_across:
            held = self.held_part(full)
            self.issue("outer_all_gather", "", held, self.all_gather_over(held, shard, self.groups.outer))()
            shard = held
        if self.group_ranks > 1:
            self.issue("all_gather", "", full, self.all_gather_over(full, shard, self.groups.gather))()
        elif not self._shards_across:
            full.copy_(shard)

    def trade(self, received: torch.Tensor, sent: torch.Tensor, unit: str = "", *, kind: str = "all_to_all") -> Pending:
        """Send the r-th of equal parts of `sent` to rank r of the shard group, and receive one from each rank; with one
        shard, over all ranks.

        This rank's own part of `received` has no defined contents. Both tensors must live until the wait.
        """
        group, ranks = self.widest
        if ranks == 1:
            return Pending()
        self.ledger.record(kind, unit, sent.numel() // ranks * (ranks - 1), sent.dtype)
        start = self.all_to_all_over(received, sent, group, ranks)
        return Pending(self.issue(kind, unit, sent, start), held=(received, sent))

    @property
    def widest(self) -> tuple[dist.ProcessGroup | None, int]:
        """The shard group, or with one shard the replicas, and the number of their ranks."""
        if self.shard_count > 1:
            return self.groups.reduce, self.shard_count
        return self.groups.replica, self.replica_count

    def broadcast(self, tensor: torch.Tensor, unit: str = "", source: int = 0) -> None:
        """Overwrite every rank's contiguous `tensor`, of any dtype, with that of one. Blocks and is not counted."""
        if self.world > 1 and tensor.numel():
            as_bytes = tensor.view(tensor.numel()).view(torch.uint8)  # gloo supports few dtypes
            self.issue("broadcast", unit, tensor, _starting(dist.broadcast, as_bytes, src=source))()

    def reduce(self, full: torch.Tensor, shard: torch.Tensor, unit: str = "") -> Pending:
        """Sum `full` [P] over all ranks into `shard` [S], which may be this rank's slice of `full`.

        Reduce-scatter over the shard group, then all-reduce over the replicas of the shard. The rest of `full` has no
        defined contents afterwards.
        """
        part = self.held_part(full) if self._shards_across else shard
        if self.group_ranks > 1:
            self.ledger.record("reduce_scatter", unit, (self.group_ranks - 1) * part.numel(), full.dtype)
            scatter = self._start(
                "reduce_scatter", unit, full, self.reduce_scatter_over(part, full, self.groups.reduce)
            )
            if self.group_count == 1:
                return Pending(partial(self._blocking, *scatter))
            if not _on_cuda(shard):
                # What follows needs the result of the reduce-scatter, and only a host that waits for it can start it.
                wait = partial(self._blocking, *scatter)
                return Pending(wait, then=lambda: self._reduce_between(full, part, shard, unit).wait())
            return self._reduce_between(full, part, shard, unit, after=scatter[1])
        if part is shard and full.data_ptr() != shard.data_ptr():
            shard.copy_(full)
        return self._reduce_between(full, part, shard, unit)

    def _reduce_between(
        self, full: torch.Tensor, part: torch.Tensor, shard: torch.Tensor, unit: str, after: Wait | None = None
    ) -> Pending:
        """Sum over the shard groups: an all-reduce of the shard, or with outer sharding a reduce-scatter of `part`.

        after: what waits for the collective from `full` that fills `part` on the device.
        """
        if after is None and not self._shards_across:
            return self.all_reduce_replicas(shard, unit)
        kind = "outer_reduce_scatter" if self._shards_across else "all_reduce"
        if self._shards_across:
            self.ledger.record(kind, unit, (self.group_count - 1) * shard.numel(), part.dtype)
            start = self.reduce_scatter_over(shard, part, self.groups.replica)
        else:
            start = self._counted_all_reduce(shard, unit)
        if after is not None:
            start = self._behind("reduce", after, start, shard.device)
        return Pending(self.issue(kind, unit, part, start), held=(full, shard))

    def _behind(self, kind: str, wait_first: Wait, start: Start, device: torch.device) -> Start:
        """Issues a collective behind another of its `kind`, for whose end `wait_first` lets the current stream wait.

        After the side stream's wait torch no longer holds the first collective's tensors, whose memory the compute
        stream may reuse when they are freed: the caller's Pending must hold them.
        """
        # A collective of NCCL starts behind the work of the stream that is current at its issue. On a side stream that
        # has waited for the reduce-scatter, the all-reduce starts when the reduce-scatter ends, and the compute stream
        # waits for both only when the unit's gradient is needed. Gathers have a side stream of their own, since they
        # need not wait for reductions.
        if kind not in self._side_streams:
            self._side_streams[kind] = torch.cuda.Stream(device)
        side_stream = self._side_streams[kind]

        def start_behind() -> Started:
            with torch.cuda.stream(side_stream):
                wait_first()
                return start()

        return start_behind

    def all_reduce_replicas(self, shard: torch.Tensor, unit: str = "") -> Pending:
        """Sum `shard` over its replicas, in place."""
        if self.replica_count == 1:
            return Pending()
        start = self._counted_all_reduce(shard, unit)
        group = self.groups.replica
        if group not in self._messages:
            return Pending(self.issue("all_reduce", unit, shard, start))
        return Pending(self.issue("all_reduce", unit, shard, _sending(self._messages[group].all_reduce, shard)))

    def _counted_all_reduce(self, shard: torch.Tensor, unit: str) -> Start:
        elements = 2 * (self.replica_count - 1) * shard.numel() // self.replica_count  # a ring's, see ledger.py
        self.ledger.record("all_reduce", unit, elements, shard.dtype)
        return self.all_reduce_over(shard, self.groups.replica)

    # ---- one collective of a group, also for the wing `parallel` -----------------------------------------------------

    def sends_messages(self, group: dist.ProcessGroup | None) -> bool:
        """Whether collectives of the group are messages between CPUs, whose sums are in rank order; see gloo.py."""
        return group in self._messages

    def all_reduce_over(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> Start:
        """Sums `values` over the group in place, in an order that the backend chooses."""
        return _starting(dist.all_reduce, values, op=dist.ReduceOp.SUM, group=group)

    def all_to_all_over(
        self, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup | None, ranks: int
    ) -> Start:
        """Exchanges equal parts in rank order; messages leave the part that a rank receives from itself as it is."""
        if group in self._messages:
            return _sending(self._messages[group].exchange, received.chunk(ranks), sent.chunk(ranks))
        return _starting(dist.all_to_all_single, received, sent, group=group)

    def parts_over(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        counts: tuple[Sequence[int], Sequence[int]],
        group: dist.ProcessGroup | None,
    ) -> Start:
        """Exchanges parts of any size. counts: elements received and sent by rank, 0 for this rank itself."""
        if group in self._messages:
            return _sending(self._messages[group].exchange, received.split(counts[0]), sent.split(counts[1]))
        return _starting(dist.all_to_all_single, received, sent, list(counts[0]), list(counts[1]), group=group)

    def all_gather_over(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None, place: int = 0
    ) -> Start:
        if group in self._messages:
            return _sending(partial(self._messages[group].all_gather, place=place), full, shard)
        return _starting(_all_gather, full, shard, group=group)

    def reduce_scatter_over(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None) -> Start:
        if group in self._messages:
            return _sending(self._messages[group].reduce_scatter, shard, full)
        return _starting(_reduce_scatter, shard, full, op=dist.ReduceOp.SUM, group=group)

    def sum_over_ranks_(self, control: torch.Tensor) -> torch.Tensor:
        """Sum a few numbers over all ranks in place. Blocks; counted as a control message, not as data."""
        if self.world > 1:
            elements = 2 * (self.world - 1) * control.numel() // self.world
            self.ledger.control.add(elements, control.element_size())
            start = _starting(dist.all_reduce, control, op=dist.ReduceOp.SUM)
            self.issue("control_sum", "", control, start, polled=True)()
        return control

    def sum_over_data_(self, control: torch.Tensor) -> torch.Tensor:
        """Sum a few numbers over the data axis in place. Every rank must call it. Blocks; counted as `sum_over_ranks_`.

        The ranks of a tensor-parallel group have the same numbers, and those of its first rank count.
        """
        return self.sum_over_ranks_(control if self.tensor_rank == 0 else control.zero_())

    def order_of_rank_0(self, order: list[int], device: torch.device) -> list[int]:
        """Rank 0's `order`, on every rank; each rank gives a list of the same length. Blocks, and is not counted."""
        if self.world == 1:
            return order
        told = torch.tensor(order, dtype=torch.int64, device=device)
        self.broadcast(told)
        if isinstance(told, FakeTensor):  # a dry run has no values
            return order
        first: list[int] = told.tolist()
        return first

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value` in rank order, on every rank. Not counted: for reports, not for steps."""
        values: list[Any] = [None] * self.world
        sequence = self.journal.issue("gather_objects", "", 0, "object")
        self._blocking(sequence, partial(dist.all_gather_object, values, value))
        return values
