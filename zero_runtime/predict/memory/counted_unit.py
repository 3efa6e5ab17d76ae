"""A unit that only counts the bytes of a real one's tensors on the device, so that a step can be replayed without them.

The schedule that calls it is the runtime's own (schedule.py). Which tensors a call allocates and frees is as in
unit_parameters.py, unit_gradients.py and offload/device_host.py, in their order. Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from zero_runtime.plan import Phase, ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.predict.messages import CONVERTED_BYTES, CONVERTED_NUMEL, SIGNS_BYTES, packed_bytes, read_back_bytes
from zero_runtime.same_host.sizes import terms_bytes
from zero_runtime.state_bytes import UnitSize
from zero_runtime.wire import ERROR_BYTES, EXACT, Wire

HELD_SOURCES = 2  # as in offload/copy_streams.py: sources of copies to the host that are held at a time
# What a tensor is for, in the order of a report.
PARAMS, GATHERED, GRADS, OPTIMIZER = "params", "gathered params", "grads", "optimizer"
WHOLE_GRADS, TRANSFERS = "whole grads", "transfers"
COMPONENTS = (PARAMS, OPTIMIZER, GRADS, GATHERED, WHOLE_GRADS, TRANSFERS)


@dataclass(eq=False)
class Block:
    """The memory of one tensor on the device."""

    component: str
    nbytes: int


@dataclass
class Book:
    """All blocks of a rank. highest: the most bytes at one time since `begin`, with the bytes by component then.

    terms: bytes that the sum under way takes for a moment, see `pass_sum`. told: called with each block, and whether it
    was allocated or freed.
    """

    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPONENTS, 0))
    total: int = 0
    highest: int = 0
    at_highest: dict[str, int] = field(default_factory=dict)
    terms: int = 0
    told: Callable[[Block, bool], None] | None = None

    def begin(self) -> None:
        """Look for the highest number of bytes from now on."""
        self.highest, self.at_highest = self.total, dict(self.now)

    def allocate(self, component: str, nbytes: float) -> Block | None:
        """A new block; None if it has no bytes."""
        block = Block(component, round(nbytes))
        if not block.nbytes:
            return None
        self.now[component] += block.nbytes
        self.total += block.nbytes
        if self.total > self.highest:
            self.begin()
        if self.told is not None:
            self.told(block, True)
        return block

    def pass_sum(self) -> None:
        """A moment in which the sum under way may be made, if ranks read each other's terms: the start of a reduction,
        or the wait for it or for a gather. Which one it is depends on when the other ranks come."""
        self.free(self.allocate(TRANSFERS, self.terms))

    def relabel(self, block: Block | None, component: str) -> Block | None:
        """Count a block as another component from now on."""
        if block is not None:
            self.now[block.component] -= block.nbytes
            self.now[component] += block.nbytes
            block.component = component
        return block

    def free(self, block: Block | None) -> None:
        if block is not None:
            self.now[block.component] -= block.nbytes
            self.total -= block.nbytes
            if self.told is not None:
                self.told(block, False)


class Copying:
    """The sources of copies to the host that are under way: see [Note: memory in program order] in copy_streams.py."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._held: deque[Block] = deque()

    def to_host(self, source: Block | None) -> None:
        """Take over a block that is copied to the host."""
        self._release(HELD_SOURCES - 1)
        if source is not None:
            self._held.append(source)

    def release(self) -> None:
        """Free all sources."""
        self._release(0)

    def _release(self, count: int) -> None:
        while len(self._held) > count:
            self._book.free(self._held.popleft())


@dataclass(frozen=True)
class CountRules:
    """The settings by which the tensors of all units are allocated.

    shard_count, replica_count: ranks that share one copy of the states, and replicas of each shard. state_bytes: of the
    optimizer's states, per element. by_messages: collectives are messages between CPUs, and a reduction receives the
    terms of the other ranks in tensors (gloo.py), or with reads_peers reads them in chunks (same_host/).
    params_in_file: offloaded parameters are in a scratch file; they are read to the host ahead of a gather, and are
    copied to the device by the gather. reduces_at_boundary: gradients are reduced in the last micro-batch alone, and
    kept in full until then (`no_sync`). updating_bytes: of tensors that exist only while the optimizer updates matrices
    (optim/matrix_owners.py). wire: which collectives are quantised. kept_bytes: per element of the model, what the
    optimizer keeps on every rank besides its states.
    """

    plan: ZeroPlan
    shard_count: int
    replica_count: int
    micro_batches: int
    state_bytes: float
    by_messages: bool
    params_in_file: bool = False
    reduces_at_boundary: bool = False
    updating_bytes: int = 0
    wire: Wire = EXACT
    kept_bytes: float = 0.0
    reads_peers: bool = False

    @property
    def group_ranks(self) -> int:
        """The ranks that a full copy is gathered from: fewer than share the states, with outer sharding."""
        return self.plan.group_ranks(self.shard_count * self.replica_count)

    @property
    def group_count(self) -> int:
        """The number of shard groups."""
        return self.shard_count * self.replica_count // self.group_ranks


class CountedReduction(NamedTuple):
    """The blocks of a reduction under way: the input in reduce dtype, the result, and what other ranks send."""

    cast: Block | None
    out: Block | None
    received: Block | None


class CountedUnit:
    """The blocks of one unit on one rank. gathers: how often its full parameters were gathered."""

    def __init__(
        self, size: UnitSize, precision: MixedPrecision, rules: CountRules, book: Book, copying: Copying
    ) -> None:
        self.trainable = size.trainable
        self._size, self._precision, self._rules, self._book, self._copying = size, precision, rules, book, copying
        self._coded = precision.weights is not None
        self._plan = rules.plan.freeing_params() if self._coded else rules.plan
        # Whether every rank has all codes, so that a gather sends nothing.
        self._held = self._coded and rules.plan.keeps_full_params
        self._numel, self._shard = size.padded_numel, size.padded_numel // rules.shard_count
        self._param = precision.stored_bytes
        self._compute = ITEMSIZE_BYTES[precision.compute or precision.param]
        self._reduce = ITEMSIZE_BYTES[precision.reduce]
        self._grad = ITEMSIZE_BYTES[precision.grad(rules.micro_batches)]
        self._casts = self._coded or not precision.computes_as_param
        self.gathers = 0
        self._current = False  # the full parameters are
        self._gathering: Block | None = None  # the gathered parameters before their cast
        self._in_gather = False
        self._brought: Block | None = None  # the offloaded shard, on the device for a gather
        self._whole_grad: Block | None = None
        self._grad_shard: Block | None = None
        self._local = False  # the full gradient accepts gradients
        self._reducing: CountedReduction | None = None
        gather = rules.wire.gather if rules.wire.gathers(rules.plan, trainable=size.trainable) else None
        # Bytes of one shard's codes, where the gathers or the reductions are quantised.
        self._gathered = packed_bytes(self._shard, gather) if gather and rules.shard_count > 1 else 0
        reduce = rules.wire.reduce if rules.shard_count > 1 else None
        self._reduced = packed_bytes(self._shard, reduce) if reduce else 0
        self._errors: Block | None = None  # error feedback, from the first reduction on
        self._allocate()

    def _allocate(self) -> None:
        """The tensors that are never freed, as in `UnitParameters._decide_aliases` and `_allocate`."""
        size, precision = self._size, self._precision
        keeps_full = self._plan.keeps_full_params
        self._full = self._book.allocate(PARAMS, self._numel * self._compute) if keeps_full else None
        is_slice = keeps_full and not self._casts
        if not is_slice and not size.params_offloaded:
            self._book.allocate(PARAMS, self._numel // (1 if self._held else self._rules.group_ranks) * self._param)
        if not size.trainable:
            return
        if size.optimizer_offloaded:
            return
        if precision.master != precision.param:
            self._book.allocate(OPTIMIZER, self._shard * ITEMSIZE_BYTES[precision.master])
        states = self._rules.state_bytes if size.state_bytes is None else size.state_bytes
        self._book.allocate(OPTIMIZER, self._shard * states)
        self._book.allocate(OPTIMIZER, self._numel * self._rules.kept_bytes)

    # ---- full parameters -------------------------------------------------------------------------------------------

    def begin_fetch(self) -> None:
        if not self._current and not self._in_gather and not self._rules.params_in_file:
            self._bring()

    def _bring(self) -> None:
        size = self._size
        if size.params_offloaded and size.separate_memory and self._brought is None:
            self._brought = self._book.allocate(TRANSFERS, self._shard * self._param)

    def unshard(self) -> None:
        if self._current or self._in_gather:
            return
        self._in_gather = True
        self.gathers += not self._held
        self._bring()
        if self._full is None:
            self._full = self._book.allocate(GATHERED, self._numel * self._compute)
        if self._gathered:
            self._gathering = self._book.allocate(GATHERED, self._gathered * (1 + self._rules.shard_count))
            self._convert()
        elif self._casts and not self._held:
            self._gathering = self._book.allocate(GATHERED, self._numel * self._param)

    def _convert(self) -> None:
        """Values to codes or back, some at a time."""
        converted = min(self._shard, CONVERTED_NUMEL[self._device]) * CONVERTED_BYTES
        self._book.free(self._book.allocate(TRANSFERS, converted))

    @property
    def _device(self) -> str:
        return "cpu" if self._rules.by_messages else "cuda"

    def wait_unshard(self) -> None:
        self.unshard()
        self._end_gather()

    def _end_gather(self) -> None:
        if self._in_gather:
            self._book.pass_sum()
            rounded = None
            if self._gathered and self._casts:  # each shard is rounded to the parameters' dtype first
                rounded = self._book.allocate(GATHERED, self._shard * self._param)
            if self._gathered:
                self._convert()
            if self._precision.weights is not None:
                read = read_back_bytes(self._numel, self._precision.weights, self._device)
                self._book.free(self._book.allocate(TRANSFERS, read))
            self._book.free(rounded)
            self._book.free(self._gathering)
            self._book.free(self._brought)
            self._gathering = self._brought = None
            self._in_gather, self._current = False, True

    def reshard(self, after: Phase) -> None:
        self._end_gather()
        if not self._current or not self._plan.releases_params_after(after):
            return
        if not self.trainable and self._plan.keeps_full_params:
            return
        self._current = False
        if not self._plan.keeps_full_params:
            self._book.free(self._full)
            self._full = None

    def renew(self) -> None:
        """As `Unit.renew`: gather again what is kept between steps."""
        if self._plan.keeps_full_params and not self._is_away:
            self.unshard()
            if self._casts:
                self._end_gather()

    @property
    def _is_away(self) -> bool:
        return self._size.params_offloaded or (self._size.optimizer_offloaded and self.trainable)

    # ---- gradients -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A `Unit` accepts gradients again, which changes no memory."""

    def take_grad(self, *, sums_locally: bool) -> None:
        """The first gradient of a backward."""
        self._open(sums_locally=sums_locally)

    def _open(self, *, sums_locally: bool) -> None:
        if self._local and self._whole_grad is not None:
            return
        self.wait_reduce()
        self._local = True
        if self._whole_grad is None:
            size = self._grad if self._plan.keeps_full_grads or sums_locally else self._reduce
            component = GRADS if self._plan.keeps_full_grads else WHOLE_GRADS
            self._whole_grad = self._book.allocate(component, self._numel * size)

    def reduce_grad(self) -> None:
        if not self.trainable:
            return
        self._open(sums_locally=False)
        self._local = False
        assert self._whole_grad is not None
        cast = None
        if self._whole_grad.nbytes != self._numel * self._reduce:
            cast = self._book.allocate(WHOLE_GRADS, self._numel * self._reduce)
        out = None if self._in_place else self._book.allocate(GRADS, self._shard * self._reduce)
        rules = self._rules
        if self._reduced:
            if rules.wire.error_feedback and self._errors is None:
                self._errors = self._book.allocate(GRADS, self._numel * ERROR_BYTES)
            traded = self._book.allocate(TRANSFERS, 2 * self._reduced * rules.shard_count)
            fed = self._book.allocate(TRANSFERS, self._shard * ERROR_BYTES if rules.wire.error_feedback else 0)
            self._convert()
            self._book.free(fed)
            self._reducing = CountedReduction(cast, out, traded)
            return
        ranks = rules.group_ranks if rules.group_ranks > 1 else rules.group_count
        self._reducing = CountedReduction(cast, out, self._receive(ranks, self._numel))

    @property
    def _in_place(self) -> bool:
        """Whether the result of a reduction is a part of its input."""
        return self._plan.keeps_full_grads or self._rules.shard_count == 1

    def _receive(self, ranks: int, numel: int) -> Block | None:
        """The tensors that receive the other ranks' terms of a reduce-scatter of `numel` elements."""
        rules, nbytes = self._rules, numel // ranks * self._reduce
        if rules.reads_peers and ranks > 1:
            self._book.terms = terms_bytes(nbytes)
            self._book.pass_sum()
        received = (ranks - 1) * nbytes if rules.by_messages and not rules.reads_peers else 0
        return self._book.allocate(TRANSFERS, received)

    @property
    def waits_late(self) -> bool:
        return False  # the bytes are the same, whenever such a reduction ends

    def wait_reduce(self) -> None:
        if self._reducing is None:
            return
        cast, out, received = self._reducing
        self._reducing = None
        if self._reduced:
            total = self._book.allocate(TRANSFERS, self._shard * ERROR_BYTES)
            self._convert()
            self._book.free(total)
        self._book.pass_sum()
        ranks = self._rules.group_ranks
        if ranks > 1:  # then the sums of the groups are summed
            self._book.free(self._receive(self._rules.group_count, self._numel // ranks))
        self._book.terms = 0
        self._book.free(received)
        if self._plan.keeps_full_grads:
            self._book.free(cast)
            return
        whole, self._whole_grad = self._whole_grad, None
        if not self._in_place:
            self._book.free(cast)
            self._book.free(whole)
        elif cast is not None:
            self._book.free(whole)
            out = cast
        else:
            out = whole
        if self._grad_shard is not None:
            self._book.free(out)
        elif self._grad == self._reduce:
            self._grad_shard = self._book.relabel(out, GRADS)
        else:
            self._grad_shard = self._book.allocate(GRADS, self._shard * self._grad)
            self._book.free(out)

    def send_grad(self) -> None:
        if not (self._size.optimizer_offloaded and self._size.separate_memory and self.trainable):
            return
        # A slice of the full gradient keeps all of it.
        source = self._whole_grad if self._plan.keeps_full_grads else self._grad_shard
        self._copying.to_host(source)
        self._whole_grad = self._grad_shard = None

    def free_grads(self) -> None:
        self.wait_reduce()
        self._local = False
        self._book.free(self._whole_grad)
        self._book.free(self._grad_shard)
        self._whole_grad = self._grad_shard = None

    # ---- update ----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """The update of offloaded parameters on the device, as `HostLocation._update_on_device`."""
        size = self._size
        if self._rules.kept_bytes and self.trainable:  # of the signs that are averaged, one unit after another
            self._book.free(self._book.allocate(TRANSFERS, self._numel * SIGNS_BYTES))
        if size.params_offloaded and not size.optimizer_offloaded and size.separate_memory and self.trainable:
            self._book.free(self._brought)
            self._brought = None
            self._copying.to_host(self._book.allocate(TRANSFERS, self._shard * self._param))
