"""The flat parameter tensors of one unit: their memory, their aliases, and the state of the full copy.

[Note: release by storage]
Tensors that autograd saved for backward alias unsharded_param's storage. So a release frees the storage itself
(resize to 0) and the next gather refills the same storage; a new tensor would leave the saved ones with stale memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from zero_runtime.codec import Codec
from zero_runtime.collectives import Collectives, Pending
from zero_runtime.deferred_values import swap_content, values_of
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import UnitStateError
from zero_runtime.flat_layout import FlatLayout, Piece, Segment
from zero_runtime.group_shard import GroupShard
from zero_runtime.guarded_parameter import ParameterGuard
from zero_runtime.initial_values import InitialValues
from zero_runtime.kernels import ops
from zero_runtime.plan import ZeroPlan
from zero_runtime.shard_location import ON_DEVICE, OffloadedShards, ShardLocation
from zero_runtime.tensor_source import ReadInto
from zero_runtime.unit_planner import UnitSpec
from zero_runtime.wings import SENT_CODES, load
from zero_runtime.wire import EXACT, Wire


class DataState(Enum):
    """State of the full copy of the parameters.

    STALE: not current, whether or not it has memory; only the shards are. UNSHARDING: a gather is under way. UNSHARDED:
    current.
    """

    STALE = "stale"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"

    __hash__ = object.__hash__  # that of Enum is a Python function, called at every change of a state


_NEXT = {
    DataState.STALE: DataState.UNSHARDING,
    DataState.UNSHARDING: DataState.UNSHARDED,
    DataState.UNSHARDED: DataState.STALE,
}


class Gather(NamedTuple):
    """A gather under way, from `shard` [S] to `full` [P], both as `Codec` sends them. Both must live until it ends."""

    pending: Pending
    shard: torch.Tensor
    full: torch.Tensor


class UnitParameters:
    """The parameter tensors of one unit on one rank. Only this class allocates, fills and frees them.

    unsharded_param [P] compute_dtype: the full copy; the modules' parameters are views of it. param_shard [S]
    param_dtype: the shard that is gathered.
    master_shard [S] master_dtype: the shard that is updated; None if frozen. group_shard: with outer sharding, what is
    gathered instead of param_shard, which is a slice of it; else None.
    """

    unsharded_param: torch.Tensor
    param_shard: torch.Tensor
    master_shard: torch.Tensor | None
    group_shard: GroupShard | None

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        plan: ZeroPlan,
        collectives: Collectives,
        device: torch.device,
        offloaded: OffloadedShards,
        wire: Wire = EXACT,
    ) -> None:
        precision = spec.precision
        self.name, self.plan = spec.name, plan
        self.is_coded = spec.is_coded
        self.params = [param for _, param in spec.params]
        self.trainable = spec.trainable
        self.layout = layout
        self._slices = spec.slices
        self.pieces: dict[str, Piece] = {piece.name: piece for piece in layout.pieces(collectives.shard_rank)}
        self.param_dtype = TORCH_DTYPE[precision.param]
        self.master_dtype = TORCH_DTYPE[precision.master]
        self.state = DataState.UNSHARDED
        self.location: ShardLocation = ON_DEVICE
        self._compute_dtype = TORCH_DTYPE[precision.compute or precision.param]
        self._keeps_full = plan.keeps_full_params
        self._has_group_shard = plan.outer_sharding is not None
        self._collectives = collectives
        self._device = device
        self.gather: Gather | None = None  # under way
        self._guard: ParameterGuard | None = None
        self._unbound: list[tuple[nn.Parameter, torch.Tensor]] = []  # meta parameters and the views to bind them to
        self._decide_aliases(offloaded)
        self._codec = Codec()
        sends_codes = wire.gathers(plan, trainable=spec.trainable) and collectives.shard_count > 1
        if sends_codes:
            self._codec = load(SENT_CODES)(wire.gather, self.param_dtype, layout.shard_count)
        self._is_direct = not (self.casts or sends_codes)  # shards are gathered into the full copy itself
        self._allocate()

    def _decide_aliases(self, offloaded: OffloadedShards) -> None:
        """Decide which tensors share memory and which are offloaded; nothing changes these answers later.

        Replicated parameters: param_shard is this rank's slice of unsharded_param, whose storage is never freed.
        Sharded parameters: param_shard is a separate tensor, because it outlives the release of unsharded_param's
        storage. It is also separate if the compute and param dtypes differ, because unsharded_param is then a cast of
        the gathered tensor. With outer sharding it is this rank's slice of group_shard.
        master_shard is param_shard itself if both have the same dtype and are stored in the same memory.
        """
        self.casts = self._compute_dtype != self.param_dtype
        self.param_is_slice = self._keeps_full and not self.casts
        separate = offloaded.separate_memory and offloaded.optimizer and not offloaded.params
        self.master_is_param = self.trainable and self.master_dtype == self.param_dtype and not separate
        self.params_offloaded = offloaded.params  # param_shard has no memory on the device between its uses
        self.states_offloaded = offloaded.optimizer and self.trainable  # the optimizer's
        self.master_offloaded = self.states_offloaded and not self.master_is_param  # else as `params_offloaded`

    def _allocate(self) -> None:
        """Allocate the tensors. Offloaded shards get no memory here; their tier binds it while it is needed."""
        self.unsharded_param = self._empty(self.layout.padded_numel, self._compute_dtype)
        self.group_shard = None
        if self._has_group_shard:
            held = self._empty(self.layout.padded_numel // self._collectives.group_ranks, self.param_dtype)
            self.group_shard = GroupShard(self.name, held, self._collectives)
            self.param_shard = self.group_shard.own
        elif self.param_is_slice:
            self.param_shard = self._own_slice()
        else:
            self.param_shard = self._empty(0 if self.params_offloaded else self.layout.shard_numel, self.param_dtype)
        if not self._keeps_full:
            self.unsharded_param.untyped_storage().resize_(0)  # `materialize` allocates it, one unit at a time
        if not self.trainable:
            self.master_shard = None
        elif self.master_is_param:
            self.master_shard = self.param_shard
        else:
            self.master_shard = self._empty(0 if self.master_offloaded else self.layout.shard_numel, self.master_dtype)

    def bind_shards(self, param: torch.Tensor | None, master: torch.Tensor | None) -> None:
        """Replace the shards that are not None, by memory that a tier owns or by empty tensors."""
        if param is not None:
            self.param_shard = param
            self.master_shard = param if self.master_is_param else self.master_shard
        if master is not None:
            self.master_shard = master

    def offload_to(self, location: ShardLocation) -> None:
        """Store the offloaded shards in `location` from now on."""
        self.location = location

    # ---- initial values ----------------------------------------------------------------------------------------------

    def materialize(self, initial: InitialValues, given: Collection[str]) -> None:
        """Copy the parameters' initial values into the flat tensors and make the parameters views of unsharded_param.

        The parameters' old storages are released. Parameters on the meta device are drawn one at a time, so that at
        most one exists in addition to the unit; those in `given` get no values. The master shard is filled before the
        values are rounded to param_dtype.
        """
        if self.state is DataState.STALE:  # so a tier has declared it, whose shards are about to be written
            self.move(DataState.UNSHARDING)
            self.move(DataState.UNSHARDED)
        with torch.no_grad():
            self._fill_storage()
            for start, stop in self.layout.gaps:
                self.unsharded_param[start:stop].zero_()
            if self.master_shard is not None:
                self.master_shard.zero_()
            for segment, param in self.placed():
                if segment.name not in given:
                    self._take_values(segment, param, initial)
                elif segment.name in self._slices.splits:
                    segment.of(self.unsharded_param).zero_()  # the padding of a slice, which no source fills
                self._bind(segment, param)
            if not self.param_is_slice:
                self.param_shard.copy_(self._own_slice())
            if self.casts:  # a gathered copy would be rounded to param_dtype too
                self.unsharded_param.copy_(self.unsharded_param.to(self.param_dtype))
            if self._keeps_full:
                self._codec.round_(self.unsharded_param)

    def _take_values(self, segment: Segment, param: nn.Parameter, initial: InitialValues) -> None:
        """Copy one parameter's values into the full tensor and into the master, which gets them before rounding."""
        values = initial.draw(segment.name, param) if param.is_meta else self._handed_over(segment.name, param)
        own = self._slices.cut(segment.name, values).reshape(-1)
        segment.of(self.unsharded_param).copy_(own)
        piece = self.pieces.get(segment.name)
        if self.master_shard is not None and piece is not None:
            piece.of(self.master_shard).copy_(own[piece.start : piece.stop])

    def _handed_over(self, name: str, param: nn.Parameter) -> torch.Tensor:
        """The model's own values, broadcast from rank 0: ranks with different seeds would train different models."""
        self._collectives.broadcast(values := values_of(param, name).to(self._device).contiguous(), self.name)
        return values

    def _bind(self, segment: Segment, param: nn.Parameter) -> None:
        """Make the parameter a view of unsharded_param, or remember to do it if it is on the meta device."""
        view = segment.of(self.unsharded_param).view(segment.shape)
        if param.is_meta:
            self._unbound.append((param, view))
        else:
            # Rebinding .data keeps the parameter's identity and gives the view a separate version counter,
            # so autograd does not mistake refilling the flat tensor for a write to a saved tensor.
            param.data = view

    def bind_initialized(self) -> None:
        """Bind the meta parameters to their views.

        Drawing one parameter requires all others to be on the meta device (initial_values.py), so none is bound before
        all units have their values.
        """
        for param, view in self._unbound:
            # A meta parameter refuses a new .data. Swapping the contents keeps references to the parameter valid.
            real = nn.Parameter(view.new_empty(0), requires_grad=param.requires_grad)
            real.data = view
            swap_content(param, real)
        self._unbound.clear()

    def placed(self) -> Iterator[tuple[Segment, nn.Parameter]]:
        """Each parameter with its segment of the flat tensor, in the order of the layout."""
        return zip(self.layout.segments, self.params, strict=True)

    # ---- the shards' values ------------------------------------------------------------------------------------------

    def fill(self, shard: torch.Tensor, names: Iterable[str], read_into: ReadInto) -> None:
        """Fill this rank's pieces of the parameters in `names` in a tensor [S] of the unit, in the order of `names`.

        `read_into` is asked for elements of full parameters. Padding of slices is left as it is.
        """
        for name in names:
            piece = self.pieces.get(name)
            if piece is not None:
                self._slices.fill(name, piece.start, piece.of(shard), read_into)

    @property
    def weights(self) -> torch.Tensor:
        """See `Unit.weights_shard`."""
        return self.param_shard if self.master_shard is None else self.master_shard

    def fill_weights(self, names: Iterable[str], read_into: ReadInto) -> None:
        """Fill the weights of the parameters in `names`, as `fill`, and round them into param_shard."""
        self.fill(self.weights, names, read_into)
        self.refresh_param_shard()

    def refresh_param_shard(self) -> None:
        """Round the updated master into param_shard; a no-op if they are the same tensor."""
        if self.master_shard is None or self.master_is_param:
            return
        if self.master_shard.device == self.param_shard.device:
            ops.cast_copy_(self.param_shard, self.master_shard)
        else:
            self.param_shard.copy_(self.master_shard)

    # ---- the full copy -----------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start gathering the full copy, which must be STALE. Does not block."""
        self.move(DataState.UNSHARDING)
        with torch.no_grad():
            fetched = self.location.fetch()
            sent = self.param_shard if fetched is None else fetched
            self._fill_storage()
            full = self.unsharded_param
            if not self._is_direct:
                sent = self._codec.encode(sent)
                full = self._of_all_ranks(sent)
            self.gather = Gather(self._gather_into(full, sent, lasting=self._is_direct), sent, full)

    def _gather_into(self, full: torch.Tensor, shard: torch.Tensor, *, lasting: bool) -> Pending:
        """Start filling `full` [P] param_dtype from the shards, or from what the ranks of a group hold of them."""
        after = None
        if self.group_shard is not None:
            shard, after = self.group_shard.values, self.group_shard.ready()
        return self._collectives.all_gather(full, shard, self.name, lasting=lasting, after=after)

    def end_gather(self) -> None:
        """Block until a gather that is under way has filled unsharded_param; a no-op without one."""
        if self.gather is None:
            return
        self.gather.pending.wait()
        if not self._is_direct:
            with torch.no_grad():
                self._codec.decode(self.unsharded_param, self.gather.full)
        self.gather = None
        self.location.drop()  # not before: the message was sent from the fetched shard
        self.move(DataState.UNSHARDED)

    def join_gather(self) -> None:
        """Gather the full copy into a buffer that is dropped, whatever the state of this rank's own. Blocks."""
        self.end_gather()
        with torch.no_grad():
            fetched = self.location.fetch()
            sent = self._codec.encode(self.param_shard if fetched is None else fetched)
            self._gather_into(self._of_all_ranks(sent), sent, lasting=False).wait()
            self.location.drop()

    def renew_group(self) -> None:
        """Start exchanging new parameters between the shard groups. Blocks until the update has written them."""
        assert self.group_shard is not None
        self.location.fetch()
        self.location.drop()
        self.group_shard.renew()

    def end_exchange(self, *, stale: bool) -> None:
        """Block until no exchange between the groups is under way; `stale`: its result is. A no-op without groups."""
        if self.group_shard is not None:
            self.group_shard.wait()
            if stale:
                self.group_shard.make_stale()

    def make_stale(self) -> None:
        """Make a current full copy STALE, and free its memory if the plan shards parameters."""
        self.move(DataState.STALE)
        if self._guard is not None:
            self._guard.close()
        if not self._keeps_full:
            self.unsharded_param.untyped_storage().resize_(0)  # see [Note: release by storage]

    def guard_with(self, guard: ParameterGuard | None) -> None:
        """Install a guard that closes the parameters whenever the full copy is freed or stale; None removes it."""
        self.open_guard()
        self._guard = guard

    def open_guard(self) -> None:
        """Allow reads of the parameters, until the full copy is stale."""
        if self._guard is not None:
            self._guard.open()

    def free(self) -> bool:
        """Release every tensor; returns whether the parameters keep full values, in tensors of their own.

        They do if the full copy is current and has no slices.
        """
        self.end_gather()
        sliced = any(segment.name in self._slices.splits for segment in self.layout.segments)
        is_whole = self.state is DataState.UNSHARDED and not sliced
        storage = self.unsharded_param.untyped_storage()  # of fixed size once a checkpoint was written from it
        for param in self.params:
            param.grad = None
            if is_whole:
                param.data = param.data.clone()
            elif not storage.resizable():
                param.data = param.data.new_empty(()).expand(param.shape)
        if not is_whole and storage.resizable():
            storage.resize_(0)  # see [Note: release by storage]
        if self.group_shard is not None:
            self.group_shard.free()
        self.unsharded_param = self.param_shard = self._empty(0, self._compute_dtype)
        self.master_shard = None
        return is_whole

    def move(self, to: DataState) -> None:
        """Enter a state; UnitStateError if the current state does not lead there."""
        if _NEXT[self.state] is not to:
            raise UnitStateError(f"unit {self.name}: parameters cannot go from {self.state.value} to {to.value}")
        self.state = to

    def _fill_storage(self) -> None:
        """Allocate the storage of the full parameters; a no-op if it exists. See [Note: release by storage]."""
        storage = self.unsharded_param.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.layout.padded_numel * self.unsharded_param.element_size())

    def _of_all_ranks(self, sent: torch.Tensor) -> torch.Tensor:
        """A buffer for what all ranks send of their shards."""
        return self._empty(sent.numel() * self.layout.shard_count, sent.dtype)

    def _own_slice(self) -> torch.Tensor:
        return self.layout.shard_of(self.unsharded_param, self._collectives.shard_rank)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)
