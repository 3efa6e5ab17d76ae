"""torch's interface to ranks that read each other: the backend "shm" of torch.distributed, for CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from zero_runtime.errors import PeerError
from zero_runtime.same_host import operations
from zero_runtime.same_host.mailbox import Mailbox
from zero_runtime.same_host.meeting import Meeting, meet
from zero_runtime.same_host.operations import Add, Call
from zero_runtime.same_host.progress import Operation, Steps, progress
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

    def _start_coalescing(self, device: torch.device) -> None:
        raise PeerError("shm begins each collective by itself, as gloo does: expected no device to coalesce them on")

    def own_messages(self) -> Any:
        """The runtime's collectives over this group."""
        return load(SHM_MESSAGES)(self)

    def shutdown(self) -> None:
        """Leave the group. The other ranks hear of it if they wait for this one. Idempotent."""
        self._progress.remove_links(self._links.values())
        for link in self._links.values():
            link.close()

    abort = shutdown

    def __del__(self) -> None:
        if hasattr(self, "_progress"):
            self.shutdown()

    def start(
        self,
        what: str,
        tensor: torch.Tensor,
        steps: Callable[[Call], Steps],
        *,
        place: int = 0,
        held: tuple[Any, ...] = (),
        numel: int | None = None,
    ) -> Operation:
        """Begin a collective. tensor: by whose dtype and size, or `numel`, the ranks check that they agree."""
        if tensor.device.type != "cpu":
            raise PeerError(f"{what}: expected a tensor on the CPU, found one on {tensor.device}; use nccl for GPUs")
        self._issued += 1
        number, kind = self._issued, NAMES.index(what)
        size = tensor.numel() if numel is None else numel
        call = Call(self._rank, self._links, self._mailbox, number, kind, size, number_of(tensor.dtype), place)
        name = f"{what} number {number} of a group of {self._size} ranks"
        return self._progress.start(Operation(name, call.refusing(steps(call)), self._links, (tensor, *held)))

    def wait(self, operation: Operation) -> None:
        """Block until an operation of this group has ended."""
        self._progress.wait(operation, self._timeout.total_seconds())

    # ---- sums --------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> SharedWork:
        tensors = _listed(tensors)
        op = opts.reduceOp if hasattr(opts, "reduceOp") else dist.ReduceOp.SUM if opts is None else opts
        return self._work([self._all_reduce(one, op) for one in tensors], tensors, behind=True)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SharedWork:
        return self.allreduce(tensors, opts)

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> Operation:
        add, by = self._addition("all_reduce", op)
        self.observe("all_reduce", tensor, tensor)
        flat, back = _flat(tensor)
        reduced = operations.all_reduce_small if flat.nbytes <= SMALL else operations.all_reduce
        return self._returning(back, self.start("all_reduce", flat, lambda call: reduced(call, flat, add, by)))

    def reduce(self, tensors: Any, opts: Any) -> SharedWork:
        tensor = _only(tensors)
        add, by = self._addition("reduce", opts.reduceOp)
        self.observe("reduce", tensor, tensor)
        flat, back = _flat(tensor)

        def steps(call: Call) -> Steps:
            yield from operations.reduce(call, flat, add, opts.rootRank)
            if by != 1 and self._rank == opts.rootRank:
                flat.div_(by)

        return self._work([self._returning(back, self.start("reduce", flat, steps, place=opts.rootRank))], tensors)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        return self._work([self._reduce_scatter(_only(outputs), _only(inputs), opts)], outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SharedWork:
        return self._work([self._reduce_scatter(output, self._parts(input), opts)], output)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._reduce_scatter(one, self._parts(whole), opts) for one, whole in pairs], outputs)

    def _reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], opts: Any) -> Operation:
        add, by = self._addition("reduce_scatter", dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        self.observe("reduce_scatter", output, list(parts))
        flat, back = _flat(output)
        sent = [_contiguous(one).view(-1) for one in _alike("reduce_scatter", parts, output)]

        def steps(call: Call) -> Steps:
            yield from operations.reduce_scatter(call, flat, sent, add)
            if by != 1:
                flat.div_(by)

        return self._returning(back, self.start("reduce_scatter", flat, steps, held=tuple(sent)))

    # ---- copies ------------------------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        inputs = _listed(inputs)
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs = [outputs]
        found = [self._all_gather(list(parts), own) for parts, own in zip(outputs, inputs, strict=True)]
        return self._work(found, outputs)

    allgather_coalesced = allgather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SharedWork:
        return self._work([self._all_gather(output, input)], output)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._all_gather(whole, own) for whole, own in pairs], outputs)

    def _all_gather(self, received: list[torch.Tensor] | torch.Tensor, own: torch.Tensor) -> Operation:
        self.observe("all_gather", received, own)
        parts = received if isinstance(received, list) else self._parts(received)
        sent, pairs = _contiguous(own).view(-1), [_flat(one) for one in _alike("all_gather", parts, own)]
        flats = [flat for flat, _ in pairs]
        operation = self.start(
            "all_gather", sent, lambda call: operations.all_gather(call, flats, sent), held=tuple(flats)
        )
        for _, back in pairs:
            self._returning(back, operation)
        return operation

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SharedWork:
        return self._work([self._all_to_all(outputs, inputs)], outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> SharedWork:
        received = output.split(list(output_sizes)) if output_sizes else self._parts(output)
        sent = input.split(list(input_sizes)) if input_sizes else self._parts(input)
        return self._work([self._all_to_all(received, sent)], output)

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Operation:
        self.observe("all_to_all", list(outputs), list(inputs))
        sent, pairs = [_contiguous(one).view(-1) for one in inputs], [_flat(one) for one in outputs]
        received = [flat for flat, _ in pairs]
        # Each pair of ranks may exchange another number of elements, so that of all of them is no common one.
        operation = self.start(
            "all_to_all",
            sent[0],
            lambda call: operations.exchange(call, received, sent),
            held=(sent, received),
            numel=0,
        )
        for _, back in pairs:
            self._returning(back, operation)
        return operation

    def broadcast(self, tensors: Any, opts: Any) -> SharedWork:
        tensor, root = _only(tensors), opts.rootRank
        self.observe("broadcast", tensor, tensor)
        flat, back = _flat(tensor)
        operation = self.start("broadcast", flat, lambda call: operations.from_root(call, flat, None, root), place=root)
        return self._work([self._returning(back if self._rank != root else None, operation)], tensors)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SharedWork:
        (flat, back), root = _flat(_only(outputs)), opts.rootRank
        parts = None
        if self._rank == root:
            parts = [_contiguous(one).view(-1) for one in _alike("scatter", _only(inputs), flat)]
        self.observe("scatter", flat, parts)
        operation = self.start(
            "scatter", flat, lambda call: operations.from_root(call, flat, parts, root), place=root, held=(parts,)
        )
        return self._work([self._returning(back, operation)], outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SharedWork:
        own, root = _contiguous(_only(inputs)).view(-1), opts.rootRank
        pairs = [_flat(one) for one in _alike("gather", _only(outputs), own)] if self._rank == root else []
        parts = [flat for flat, _ in pairs] or None
        self.observe("gather", parts, own)
        operation = self.start(
            "gather", own, lambda call: operations.to_root(call, own, parts, root), place=root, held=(parts,)
        )
        for _, back in pairs:
            self._returning(back, operation)
        return self._work([operation], outputs)

    def barrier(self, opts: Any = None) -> SharedWork:
        return self._work([self.start("barrier", torch.empty(0), operations.barrier)], None)

    # ---- messages between two ranks ----------------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int) -> SharedWork:
        tensor = _only(tensors)
        self.observe("send", None, tensor)
        sent = _contiguous(tensor)
        call = self._message(next(self._sent[peer]), sent, tag)
        name = f"a message to rank {peer} of a group of {self._size} ranks"
        operation = Operation(name, operations.send(call, sent, peer), self._links, (sent,))
        return self._work([self._progress.start(operation)], tensors)

    def recv(self, tensors: Any, peer: int, tag: int) -> SharedWork:
        return self._receive(tensors, [peer], tag)

    def recv_anysource(self, tensors: Any, tag: int) -> SharedWork:
        return self._receive(tensors, list(self._links), tag)

    def _receive(self, tensors: Any, peers: Sequence[int], tag: int) -> SharedWork:
        tensor = _only(tensors)
        flat, back = _flat(tensor)
        source: list[int] = []
        call = self._message(0, flat, tag)
        name = f"a message from rank {' or '.join(map(str, peers))} of a group of {self._size} ranks"
        operation = Operation(name, operations.receive(call, flat, peers, source.append), self._links, (flat,))
        work = self._work([self._returning(back, self._progress.start(operation))], tensors)
        work.sources = source
        return work

    def _message(self, number: int, tensor: torch.Tensor, tag: int) -> Call:
        size = (tensor.numel(), number_of(tensor.dtype), tag)
        return Call(self._rank, self._links, self._mailbox, number, MESSAGE, *size)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _work(self, started: Sequence[Operation], output: Any, *, behind: bool = False) -> SharedWork:
        if behind:  # the other ranks need this one's part, which it may not be waiting for
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

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """A part of the elements of a tensor for each rank, in its order."""
        if whole.numel() % self._size:
            raise PeerError(f"expected a number of elements that is divisible by {self._size}, found {whole.numel()}")
        return list(whole.view(self._size, -1)) if whole.is_contiguous() else list(whole.chunk(self._size))

    def observe(self, what: str, received: Any, sent: Any) -> None:
        """Tell the observer of a collective or message."""
        if (observer := SharedGroup.observer) is not None:
            observer(what, received, sent, self._size)

    @staticmethod
    def _returning(back: Callable[[], None] | None, operation: Operation) -> Operation:
        """The operation, at whose end a result is copied from a contiguous tensor to where it belongs."""
        if back is not None:
            operation.then(lambda one: back() if one.error is None else None)
        return operation


# torch 2.13 renamed these; 2.12 calls the old names.
for _new, _old in (
    ("all_gather_single", "_allgather_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ("all_to_all_single", "alltoall_base"),
):
    setattr(SharedGroup, _old, getattr(SharedGroup, _new))


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _only(found: Any) -> Any:
    """The one tensor or list of tensors of a rank: torch lists them by device, of which a rank has one."""
    if isinstance(found, torch.Tensor):
        return found
    (one,) = found
    return one


def _alike(what: str, parts: Sequence[torch.Tensor], own: torch.Tensor) -> Sequence[torch.Tensor]:
    """The parts, which must have the size and dtype of this rank's tensor: others' memory is read by them."""
    for rank, part in enumerate(parts):
        if (part.numel(), part.dtype) != (own.numel(), own.dtype):
            expected, found = (f"{one.numel()} {str(one.dtype).removeprefix('torch.')}" for one in (own, part))
            raise PeerError(f"{what}: expected parts of {expected}, as this rank's own, found {found} for rank {rank}")
    return parts


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A flat contiguous tensor with the elements, and what copies them back if it is not the tensor's own memory."""
    own = tensor.detach()
    if own.is_contiguous():
        return own.view(-1), None
    copy = own.contiguous()

    def back() -> None:
        own.copy_(copy)

    return copy.view(-1), back
