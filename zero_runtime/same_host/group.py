"""torch's interface to ranks that read each other: the backend "shm" of torch.distributed, for CPU tensors."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from zero_runtime.errors import PeerError
from zero_runtime.same_host import operations
from zero_runtime.same_host.links import Link
from zero_runtime.same_host.mailbox import Mailbox
from zero_runtime.same_host.meeting import Meeting, meet
from zero_runtime.same_host.operations import Add, Call
from zero_runtime.same_host.progress import Operation, Progress, Steps, progress
from zero_runtime.same_host.users_tensors import Tensors, lay
from zero_runtime.same_host.what import MESSAGE, NAMES, number_of
from zero_runtime.same_host.work import SharedWork
from zero_runtime.wings import SHM_MESSAGES, load
from zero_runtime.world import SHM

SMALL = 2**14  # bytes of a tensor that every rank sums itself
_reasons: list[str] = []  # why groups of this process are gloo's
_ADD: dict[Any, Add] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def register() -> None:
    """Make the backend known to torch.distributed, before the default group is made with it. Idempotent."""
    _reasons.clear()
    if SHM not in dist.Backend.backend_list:
        dist.Backend.register_backend(SHM, create, devices=["cpu"])
        # torch 2.15 attaches its flight recorder to every other group, by a name that C++ keeps in a group's backends.
        recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recorded.add(SHM)


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The group of these ranks: a SharedGroup, or gloo's where they may not read each other. Called by torch."""
    found = meet(store, rank, size, timeout)
    if found.reason:
        _reasons.append(found.reason)
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return SharedGroup(found, rank, size, timeout)


def reason() -> str:
    """Why the ranks of the default group do not read each other; empty if they do."""
    if isinstance(dist.group.WORLD, SharedGroup) or dist.get_world_size() == 1:
        return ""
    return next(iter(_reasons), "the default group was made with another backend")


_ProcessGroup: Any = dist.ProcessGroup  # its declaration differs from version to version of torch


class SharedGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose ranks read each other's tensors. Collectives of one group are issued in one order by all.

    observer: called with the name of each collective and message, its tensors as (received, sent) and the number of
    ranks, before it begins.
    """

    observer: ClassVar[Callable[[str, Any, Any, int], None] | None] = None

    def __init__(self, meeting: Meeting, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._links = meeting.links
        self._mailbox = Mailbox(range(size))
        self._issued = 0  # collectives
        self._sent: dict[int, Iterator[int]] = {peer: itertools.count(1) for peer in self._links}
        self._progress = progress()
        self._progress.add_links(self._links.values(), self._mailbox.receive)
        # Not `__del__`: a group that a compiled model keeps is collected when the interpreter has cleared this module.
        weakref.finalize(self, _leave, self._progress, self._links.values()).atexit = False

    def getBackendName(self) -> str:
        return SHM

    def _set_group_name(self, name: str) -> None:
        # torch keeps the name in a group's backends, which there are none of here.
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has issued. torch's own method asks a backend, which there is none of here."""
        return self._issued

    def _get_backend(self, device: torch.device) -> SharedGroup:
        """torch asks a group's backend for what it can do beyond its collectives: here the group itself, nothing."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """torch asks a group for the devices of its backends, which there are none of here."""
        return [torch.device("cpu")]

    def _start_coalescing(self, device: torch.device) -> None:
        raise PeerError("shm begins each collective by itself, as gloo does: expected no device to coalesce them on")

    def own_messages(self) -> Any:
        """The runtime's collectives over this group."""
        return load(SHM_MESSAGES)(self)

    def shutdown(self) -> None:
        """Leave the group. The other ranks hear of it if they wait for this one. Idempotent."""
        _leave(self._progress, self._links.values())

    abort = shutdown

    def start(
        self,
        what: str,
        tensor: torch.Tensor,
        steps: Callable[[Call], Steps],
        *,
        place: int = 0,
        held: tuple[Any, ...] = (),
        numel: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> Operation:
        """Begin a collective. tensor: by whose dtype and size, or `numel`, the ranks check that they agree. then: the
        last part of the operation."""
        if tensor.device.type != "cpu":
            raise PeerError(f"{what}: expected a tensor on the CPU, found one on {tensor.device}; use nccl for GPUs")
        self._issued += 1
        number, kind = self._issued, NAMES.index(what)
        size = tensor.numel() if numel is None else numel
        call = Call(self._rank, self._links, self._mailbox, number, kind, size, number_of(tensor.dtype), place)
        name = f"{what} number {number} of a group of {self._size} ranks"
        return self._progress.start(Operation(name, call.refusing(steps(call)), self._links, (tensor, *held), then))

    def wait(self, operation: Operation) -> None:
        """Block until an operation of this group has ended."""
        self._progress.wait(operation, self._timeout.total_seconds())

    # ---- sums --------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SharedWork:
        op = opts.reduceOp if hasattr(opts, "reduceOp") else dist.ReduceOp.SUM if opts is None else opts
        add, by = self._addition("all_reduce", op)

        def steps(call: Call, found: Tensors) -> Steps:
            (tensor,) = found.received
            reduced = operations.all_reduce_small if tensor.nbytes <= SMALL else operations.all_reduce
            return reduced(call, tensor, add, by)

        found = _listed(tensors)
        return self._begin("all_reduce", [Tensors((one,)) for one in found], steps, opts, found)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SharedWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> SharedWork:
        add, by = self._addition("reduce", opts.reduceOp)
        tensor, root = _only(tensors), opts.rootRank

        def steps(call: Call, found: Tensors) -> Steps:
            yield from operations.reduce(call, found.any, add, root)
            if by != 1 and self._rank == root:
                found.any.div_(by)

        found = Tensors((tensor,)) if self._rank == root else Tensors((), (tensor,))
        return self._begin("reduce", [found], steps, opts, tensors)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        return self._reduce_scatter([Tensors((_only(outputs),), _only(inputs))], opts, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SharedWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._reduce_scatter([Tensors((one,), self._parts(whole)) for one, whole in pairs], opts, outputs)

    def _reduce_scatter(self, found: Sequence[Tensors], opts: Any, outputs: Any) -> SharedWork:
        add, by = self._addition("reduce_scatter", dist.ReduceOp.SUM if opts is None else opts.reduceOp)

        def steps(call: Call, found: Tensors) -> Steps:
            (total,) = found.received
            yield from operations.reduce_scatter(call, total, found.sent, add)
            if by != 1:
                total.div_(by)

        return self._begin("reduce_scatter", found, steps, opts, outputs)

    # ---- copies ------------------------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        lists = [outputs] if outputs and isinstance(outputs[0], torch.Tensor) else outputs
        pairs = zip(lists, _listed(inputs), strict=True)
        return self._all_gather([Tensors(list(parts), (own,)) for parts, own in pairs], opts, outputs)

    allgather_coalesced = allgather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SharedWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._all_gather([Tensors(self._parts(whole), (own,)) for whole, own in pairs], opts, outputs)

    def _all_gather(self, found: Sequence[Tensors], opts: Any, outputs: Any) -> SharedWork:
        def steps(call: Call, found: Tensors) -> Steps:
            return operations.all_gather(call, found.received, found.sent[0])

        return self._begin("all_gather", found, steps, opts, outputs)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        def steps(call: Call, found: Tensors) -> Steps:
            return operations.exchange(call, found.received, found.sent)

        return self._begin("all_to_all", [Tensors(outputs, inputs)], steps, opts, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> SharedWork:
        received = output.split(list(output_sizes)) if output_sizes else self._parts(output)
        return self.alltoall(received, input.split(list(input_sizes)) if input_sizes else self._parts(input), opts)

    def broadcast(self, tensors: Any, opts: Any) -> SharedWork:
        tensor, root = _only(tensors), opts.rootRank

        def steps(call: Call, found: Tensors) -> Steps:
            return operations.from_root(call, found.any, None, root)

        found = Tensors((), (tensor,)) if self._rank == root else Tensors((tensor,))
        return self._begin("broadcast", [found], steps, opts, tensors)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SharedWork:
        def steps(call: Call, found: Tensors) -> Steps:
            return operations.from_root(call, found.received[0], found.sent or None, opts.rootRank)

        found = Tensors((_only(outputs),), _only(inputs) if self._rank == opts.rootRank else ())
        return self._begin("scatter", [found], steps, opts, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SharedWork:
        def steps(call: Call, found: Tensors) -> Steps:
            return operations.to_root(call, found.sent[0], found.received or None, opts.rootRank)

        found = Tensors(_only(outputs) if self._rank == opts.rootRank else (), (_only(inputs),))
        return self._begin("gather", [found], steps, opts, outputs)

    def barrier(self, opts: Any = None) -> SharedWork:
        operation = self.start("barrier", torch.empty(0), operations.barrier)
        return self._work([operation], None, behind=_is_async(opts))

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout)

    # ---- messages between two ranks ----------------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int) -> SharedWork:
        tensor = _only(tensors)
        self.observe("send", None, tensor)
        ((found,), _) = lay("send", [Tensors((), (tensor,))], self._rank)
        call = self._message(next(self._sent[peer]), found.any, tag)
        name = f"a message to rank {peer} of a group of {self._size} ranks"
        operation = Operation(name, operations.send(call, found.any, peer), self._links, (found.any,))
        # The peer needs nothing more of this rank, unless the connection is full.
        self._progress.start(operation)
        return self._work([operation], tensors, behind=self._links[peer].is_sending)

    def recv(self, tensors: Any, peer: int, tag: int) -> SharedWork:
        return self._receive(tensors, [peer], tag)

    def recv_anysource(self, tensors: Any, tag: int) -> SharedWork:
        return self._receive(tensors, list(self._links), tag)

    def _receive(self, tensors: Any, peers: Sequence[int], tag: int) -> SharedWork:
        source: list[int] = []
        ((found,), back) = lay("recv", [Tensors((_only(tensors),))], self._rank)
        call = self._message(0, found.any, tag)
        name = f"a message from rank {' or '.join(map(str, peers))} of a group of {self._size} ranks"
        steps = operations.receive(call, found.any, peers, source.append)
        operation = self._progress.start(Operation(name, steps, self._links, (found.any,), back))
        work = self._work([operation], tensors, behind=True)
        work.sources = source
        return work

    def _message(self, number: int, tensor: torch.Tensor, tag: int) -> Call:
        size = (tensor.numel(), number_of(tensor.dtype), tag)
        return Call(self._rank, self._links, self._mailbox, number, MESSAGE, *size)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _begin(
        self, what: str, asked: Sequence[Tensors], steps: Callable[..., Steps], opts: Any, output: Any
    ) -> SharedWork:
        """Begin a collective of a user, or several of one kind. steps: called with the call and its tensors, `found`.
        output: the result of the work."""
        for one in asked:
            self.observe(what, one.received, one.sent)
        laid, back = lay(what, asked, self._rank)
        place = opts.rootRank if hasattr(opts, "rootRank") else 0
        # Each pair of ranks may exchange another number of elements, so there is no common one.
        numel = 0 if what == "all_to_all" else None
        started = [
            self.start(what, one.any, partial(steps, found=one), place=place, held=one, numel=numel, then=back)
            for one in laid
        ]
        return self._work(started, output, behind=_is_async(opts))

    def _work(self, started: Sequence[Operation], output: Any, *, behind: bool) -> SharedWork:
        if behind:  # the other ranks need this one's part, and it may wait for something else
            for one in started:
                self._progress.go_behind(one)
        return SharedWork(started, self._timeout, output)

    def _addition(self, what: str, op: Any) -> tuple[Add, int]:
        """The function that adds two terms, and by what the sum is divided."""
        kind = getattr(op, "op", op)  # ReduceOp, or its inner enumeration
        add = next((add for known, add in _ADD.items() if known == kind), None)
        if add is None:
            raise PeerError(
                f"{what}: expected one of {', '.join(str(one) for one in _ADD)}, found {op}; use gloo for it"
            )
        return add, self._size if kind == dist.ReduceOp.AVG else 1

    def _parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A part of the elements of a tensor for each rank, in its order."""
        if whole.numel() % self._size:
            raise PeerError(f"expected a number of elements that is divisible by {self._size}, found {whole.numel()}")
        return whole.view(self._size, -1).unbind() if whole.is_contiguous() else whole.chunk(self._size)

    def observe(self, what: str, received: Any, sent: Any) -> None:
        """Tell the observer of a collective or message."""
        if (observer := SharedGroup.observer) is not None:
            observer(what, received, sent, self._size)


# torch 2.13 renamed these; 2.12 calls the old names.
for _new, _old in (
    ("all_gather_single", "_allgather_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ("all_to_all_single", "alltoall_base"),
):
    setattr(SharedGroup, _old, getattr(SharedGroup, _new))


def _leave(found: Progress, links: Collection[Link]) -> None:
    found.remove_links(links)
    for link in links:
        link.close()


def _is_async(opts: Any) -> bool:
    """Whether the caller goes on before the collective has ended; torch's own callers in C++ say nothing."""
    return getattr(opts, "asyncOp", True)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _only(found: Any) -> Any:
    """The one tensor or list of tensors of a rank: torch lists them by device, of which a rank has one."""
    if isinstance(found, torch.Tensor):
        return found
    (one,) = found
    return one
