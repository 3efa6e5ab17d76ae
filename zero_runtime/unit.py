"""The flat tensors of one unit: their allocation, their aliases and the two state machines that guard them.

[Note: flat tensors]
P = elements of the unit, padded; S = P / shard count. The flat tensors, in the order in which values pass through them:
master_shard [S] -> param_shard [S] -> unsharded_param [P] -> unsharded_grad [P] -> grad_shard [S] -> master_shard.
Other files only see shards (the optimizer, the offload tiers, checkpoints) or named parameters; the full flat tensors
are private to this file.

[Note: release by storage]
Tensors that autograd saved for backward alias unsharded_param's storage. So a release frees the storage itself
(resize to 0) and the next gather refills the same storage; a new tensor would leave the saved ones with stale memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from threading import Event

import torch
from torch import nn

from zero_runtime.collectives import Collectives, Pending
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import UnitStateError
from zero_runtime.flat_layout import FlatLayout, Segment
from zero_runtime.guarded_parameter import ParameterGuard
from zero_runtime.initial_values import InitialValues, swap_content
from zero_runtime.kernels import ops
from zero_runtime.plan import Partition, Phase, ZeroPlan
from zero_runtime.shard_location import ON_DEVICE, OffloadedShards, ShardLocation
from zero_runtime.tensor_source import TensorSource
from zero_runtime.unit_planner import UnitSpec

READ_NUMEL = 4 << 20  # elements read from a source at a time: bounds the memory needed in addition to the shards


class DataState(Enum):
    """State of the parameters: only the shards are current, a gather is under way, or the full copy is current."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class GradState(Enum):
    """State of the gradients: none, local and unreduced, being reduced, or reduced to this rank's shard of the sum."""

    EMPTY = "empty"
    LOCAL = "local"
    REDUCING = "reducing"
    REDUCED = "reduced"


_DATA_MOVES = {
    (DataState.SHARDED, DataState.UNSHARDING),
    (DataState.UNSHARDING, DataState.UNSHARDED),
    (DataState.UNSHARDED, DataState.SHARDED),
}
_GRAD_MOVES = {
    (GradState.EMPTY, GradState.LOCAL),
    (GradState.LOCAL, GradState.LOCAL),
    (GradState.LOCAL, GradState.REDUCING),
    (GradState.REDUCING, GradState.REDUCED),
    (GradState.REDUCED, GradState.LOCAL),
    (GradState.REDUCED, GradState.EMPTY),
    (GradState.LOCAL, GradState.EMPTY),
}


class Unit:
    """The tensors of one unit on one rank. Only this class allocates, fills and frees them."""

    def __init__(
        self,
        spec: UnitSpec,
        plan: ZeroPlan,
        collectives: Collectives,
        device: torch.device,
        *,
        micro_batches: int,
        offloaded: OffloadedShards | None = None,
        block_numel: int = 1,
    ) -> None:
        self.name = spec.name
        self.modules = spec.modules
        self.trainable = spec.trainable
        self.shared = spec.shared
        self.precision = precision = spec.precision
        self.params = [param for _, param in spec.params]
        shapes = [(name, tuple(param.shape)) for name, param in spec.params]
        self.layout = FlatLayout.build(
            shapes, shard_count=collectives.shard_count, world=collectives.world, block_numel=block_numel
        )
        self._plan = plan
        self._collectives = collectives
        self._device = device
        self._param_dtype = TORCH_DTYPE[precision.param]
        self._compute_dtype = TORCH_DTYPE[precision.compute or precision.param]
        self._master_dtype = TORCH_DTYPE[precision.master]
        self._reduce_dtype = TORCH_DTYPE[precision.reduce]
        self._grad_dtype = TORCH_DTYPE[precision.grad(micro_batches)]

        self.data_state = DataState.UNSHARDED
        self.grad_state = GradState.EMPTY
        self.uses = 0  # running calls of modules that read the parameters
        self._gathering: Pending | None = None
        self._gathered: torch.Tensor | None = None  # [P] param_dtype, while UNSHARDING
        self._gathered_from: torch.Tensor | None = None  # [S] param_dtype, while UNSHARDING
        self._reducing: Pending | None = None
        self._reduce_out: torch.Tensor | None = None  # [S] reduce_dtype, while REDUCING
        self._filled: set[int] = set()  # parameters (by index) with a gradient in unsharded_grad
        self._arrived: set[int] = set()  # parameters (by index) whose gradient came in the current backward
        self.unsharded_grad: torch.Tensor | None = None  # [P] grad_dtype (R grads) or reduce_dtype (S grads)
        self.grad_shard: torch.Tensor | None = None  # [S] grad_dtype
        self._squares: torch.Tensor | None = None  # result of `grad_squares`, kept for a gradient that was sent away
        self._unbound: list[tuple[nn.Parameter, torch.Tensor]] = []  # meta parameters and the views to bind them to
        self._offloaded = offloaded or OffloadedShards()
        self._location: ShardLocation = ON_DEVICE
        self.grad_sent = Event()  # set once grad_shard of the step is where an offloaded unit is updated
        self._guard: ParameterGuard | None = None
        self._allocate()

    # ---- initial values -----------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Allocate the parameter and master tensors; the only place that decides which of them alias.

        Replicated parameters: param_shard is this rank's slice of unsharded_param, whose storage is never freed.
        Sharded parameters: param_shard is a separate tensor, because it outlives the release of unsharded_param's
        storage. It is also separate if the compute and param dtypes differ, because unsharded_param is then a cast of
        the gathered tensor.
        master_shard is param_shard itself if `master_is_param`; frozen parameters have none.
        Offloaded shards have no memory here; their tier binds it while it is needed.
        """
        self.unsharded_param = self._empty(self.layout.padded_numel, self._compute_dtype)  # [P]
        if self._plan.params is Partition.REPLICATED and self._compute_dtype == self._param_dtype:
            self.param_shard = self._own_slice(self.unsharded_param)  # [S]
        elif self.params_offloaded:
            self.param_shard = self._empty(0, self._param_dtype)
        else:
            self.param_shard = self._empty(self.layout.shard_numel, self._param_dtype)  # [S]
        if self._plan.params is Partition.SHARDED:
            self.unsharded_param.untyped_storage().resize_(0)  # `materialize` allocates it, one unit at a time
        self.master_shard: torch.Tensor | None = None  # [S]
        if self.trainable and not self.master_is_param:
            self.master_shard = self._empty(0 if self.master_offloaded else self.layout.shard_numel, self._master_dtype)
        elif self.trainable:
            self.master_shard = self.param_shard

    # ---- offloaded shards ----------------------------------------------------------------------------------------

    @property
    def params_offloaded(self) -> bool:
        """Whether param_shard is offloaded: it has no memory on the device between its uses."""
        return self._offloaded.params

    @property
    def states_offloaded(self) -> bool:
        """Whether the optimizer's states are offloaded; always False for a frozen unit."""
        return self._offloaded.optimizer and self.trainable

    @property
    def master_is_param(self) -> bool:
        """Whether master_shard is param_shard itself: if both have the same dtype and are stored in the same memory."""
        parted = self._offloaded.separate_memory and self._offloaded.optimizer and not self._offloaded.params
        return self.trainable and self._master_dtype == self._param_dtype and not parted

    @property
    def master_offloaded(self) -> bool:
        """Whether master_shard is offloaded as its own tensor; one that is param_shard follows `params_offloaded`."""
        return self.states_offloaded and not self.master_is_param

    def settle(self) -> None:
        """Block until no update or copy of the shards is under way."""
        self._location.settle()

    @property
    def device(self) -> torch.device:
        """The device that the unit computes on, wherever its shards are stored."""
        return self._device

    @property
    def grad_dtype(self) -> torch.dtype:
        return self._grad_dtype

    @property
    def param_dtype(self) -> torch.dtype:
        return self._param_dtype

    @property
    def master_dtype(self) -> torch.dtype:
        return self._master_dtype

    def offload_to(self, location: ShardLocation) -> None:
        """Store this unit's offloaded shards in `place` from now on."""
        self._location = location

    def bind_shards(self, param: torch.Tensor | None, master: torch.Tensor | None) -> None:
        """Replace the shards that are not None, by memory that a tier owns or by empty tensors."""
        if param is not None:
            self.param_shard = param
            self.master_shard = param if self.master_is_param else self.master_shard
        if master is not None:
            self.master_shard = master

    def begin_fetch(self) -> None:
        """Start copying offloaded parameters to the device; a no-op for all others. Does not block."""
        if self.data_state is DataState.SHARDED:
            self._location.begin_fetch()

    def materialize(self, initial: InitialValues, given: Collection[str] = ()) -> None:
        """Copy the parameters' initial values into the flat tensors and make the parameters views of unsharded_param.

        The parameters' old storages are released. Parameters on the meta device are drawn one at a time, so that at
        most one exists in addition to the unit; those in `given` have no values until `read_values`. The master shard
        is filled before the values are rounded to param_dtype. If the plan shards parameters, the full copy is freed
        immediately, so at most one unit is unsharded while a model is built.

        Call it after all units have allocated their shards: a shard allocated between two calls would split the memory
        that the first unit's full copy freed, and the second unit's full copy would not fit into it.
        """
        with torch.no_grad():
            self._fill_storage()
            for start, stop in self.layout.gaps:
                self.unsharded_param[start:stop].zero_()
            if self.master_shard is not None:
                self.master_shard.zero_()
            pieces = {piece.name: piece for piece in self.layout.pieces(self._collectives.shard_rank)}
            for segment, param in self.placed():
                view = self._flat(segment).view(segment.shape)
                if segment.name in given:
                    self._unbound.append((param, view))
                    continue
                values = initial.draw(segment.name, param) if param.is_meta else self._handed_over(param)
                self._flat(segment).copy_(values.reshape(-1))
                piece = pieces.get(segment.name)
                if self.master_shard is not None and piece is not None:
                    part = values.reshape(-1)[piece.start : piece.stop]
                    self.master_shard[piece.shard_offset :][: part.numel()].copy_(part)
                if param.is_meta:
                    self._unbound.append((param, view))
                else:
                    # Rebinding .data keeps the parameter's identity and gives the view a separate version counter,
                    # so autograd does not mistake refilling the flat tensor for a write to a saved tensor.
                    param.data = view
            own = self._own_slice(self.unsharded_param)
            if self.param_shard.data_ptr() != own.data_ptr():
                self.param_shard.copy_(own)
            if self._compute_dtype != self._param_dtype:  # a gathered copy would be rounded to param_dtype too
                self.unsharded_param.copy_(self.unsharded_param.to(self._param_dtype))
        self.reshard(Phase.BACKWARD)

    def bind_initialized(self) -> None:
        """Bind the meta parameters to their views. Call it after `materialize` of all units. Idempotent.

        Drawing one parameter requires all others to be on the meta device (initial_values.py), so none is bound
        earlier. A meta parameter refuses a new .data, so its content is swapped instead; references to the parameter
        stay valid.
        """
        for param, view in self._unbound:
            real = nn.Parameter(view.new_empty(0), requires_grad=param.requires_grad)
            real.data = view
            swap_content(param, real)
        self._unbound.clear()

    def placed(self) -> Iterator[tuple[Segment, nn.Parameter]]:
        """Each parameter with its segment of the flat tensor, in the order of the layout."""
        return zip(self.layout.segments, self.params, strict=True)

    def _handed_over(self, param: nn.Parameter) -> torch.Tensor:
        """The model's own values, broadcast from rank 0: ranks with different seeds would train different models."""
        values = param.detach().to(self._device).contiguous()
        self._collectives.broadcast(values, self.name)
        return values

    def _flat(self, segment: Segment) -> torch.Tensor:
        return self.unsharded_param[segment.offset : segment.offset + segment.numel]

    # ---- parameters --------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start gathering the full parameters. Does not block; a no-op unless SHARDED."""
        if self.data_state is not DataState.SHARDED:
            return
        self._move_data(DataState.UNSHARDING)
        with torch.no_grad():
            fetched = self._location.fetch()
            self._gathered_from = self.param_shard if fetched is None else fetched
            self._fill_storage()
            self._gathered = self.unsharded_param
            if self._compute_dtype != self._param_dtype:
                self._gathered = self._empty(self.layout.padded_numel, self._param_dtype)
            self._gathering = self._collectives.all_gather(self._gathered, self._gathered_from, self.name)

    def _fill_storage(self) -> None:
        """Allocate the storage of the full parameters; a no-op if it exists. See [Note: release by storage]."""
        storage = self.unsharded_param.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.layout.padded_numel * self.unsharded_param.element_size())

    def wait_unshard(self) -> None:
        """Block until the full parameters may be used, starting the gather if necessary, and open the guard."""
        self._collectives.journal.enter(self.name)
        self.unshard()
        self._end_gather()
        if self._guard is not None:
            self._guard.open()

    def _end_gather(self) -> None:
        """Block until a gather that is under way has filled unsharded_param."""
        if self._gathering is not None:
            self._gathering.wait()
            if self._gathered is not self.unsharded_param and self._gathered is not None:
                self.unsharded_param.copy_(self._gathered)
            self._gathering = self._gathered = self._gathered_from = None
            self._location.drop()
            self._move_data(DataState.UNSHARDED)

    def guard_with(self, guard: ParameterGuard | None) -> None:
        """Install a guard that closes the parameters whenever the full copy is freed or stale; None removes it."""
        if self._guard is not None:
            self._guard.open()
        self._guard = guard

    def renew(self) -> None:
        """Start gathering a full copy that is kept between steps, after the shards have changed.

        All ranks must call it for all units in the same order. A no-op if the plan frees full copies, or if the unit's
        update runs elsewhere and may still be under way. Blocks only if the gather needs a separate buffer.

        The end of a step calls it, not the next forward: a parameter read between two steps would otherwise have old
        values, and a gather that the read itself starts would hang if only one rank reads.
        """
        if self._plan.params is not Partition.REPLICATED or self._location is not ON_DEVICE:
            return
        self.unshard()
        if self._gathered is not self.unsharded_param:  # a separate buffer: at most one may exist at a time
            self._end_gather()

    def wait_current(self) -> bool:
        """Wait for a gather under way; return whether the full parameters hold this step's values.

        Never starts a gather in which other ranks must take part.
        """
        if self._plan.params is Partition.REPLICATED and self._collectives.shard_count == 1:
            self.unshard()  # a shard group of one rank: sends nothing, so the other ranks need not take part
        self._end_gather()
        return self.data_state is DataState.UNSHARDED

    @property
    def loses_writes(self) -> bool:
        """Whether the next step discards a write to the full parameters, because updates start from another tensor."""
        return self._compute_dtype != self._param_dtype or (self.trainable and not self.master_is_param)

    def begin_use(self) -> None:
        """Record that a call that reads the parameters has begun."""
        self.uses += 1

    def end_use(self) -> None:
        """Record that a call that reads the parameters has ended."""
        self.uses -= 1

    def name_of(self, param: nn.Parameter) -> str:
        """The full name of one of this unit's parameters."""
        places = (place for place, own in enumerate(self.params) if own is param)
        return self.layout.segments[next(places)].name

    def reshard(self, after: Phase) -> None:
        """Declare the full parameters unused after this phase; the plan decides whether they are freed or become stale.

        Waits for a gather under way. A no-op while SHARDED.
        """
        self._end_gather()
        if self.data_state is not DataState.UNSHARDED or not self._plan.releases_params_after(after):
            return
        if not self.trainable and self._plan.params is Partition.REPLICATED:
            return  # a step does not change frozen parameters, so their full copy is never stale
        self._move_data(DataState.SHARDED)
        if self._plan.params is Partition.SHARDED:
            self.unsharded_param.untyped_storage().resize_(0)  # see [Note: release by storage]

    # ---- gradients ---------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Reset the record of arrived gradients at the start of a backward."""
        self._arrived.clear()

    @property
    def grads_arrived(self) -> bool:
        """Whether every parameter's gradient has arrived in the current backward."""
        return len(self._arrived) == len(self.params)

    def take_grad(self, index: int, *, sums_locally: bool) -> bool:
        """Move `params[index].grad` into the flat gradient. Returns `grads_arrived`.

        `sums_locally`: later micro-batches add to the flat gradient before it is reduced.
        """
        param, segment = self.params[index], self.layout.segments[index]
        assert param.grad is not None, f"unit {self.name}: no gradient for {segment.name}"
        if self.data_state is DataState.SHARDED:
            raise UnitStateError(
                f"unit {self.name}: a gradient for {segment.name} came while its parameters were released or stale, so "
                "something read them without calling the module that owns them; call the module, or give the "
                "parameter to a module that is called"
            )
        if index in self._arrived and self.grad_state in (GradState.REDUCING, GradState.REDUCED):
            raise UnitStateError(
                f"unit {self.name}: expected no gradient of {segment.name} after the unit was reduced in this "
                "backward, found one; it would be lost. Use torch.utils.checkpoint with use_reentrant=False"
            )
        self._open_grads(sums_locally=sums_locally)
        assert self.unsharded_grad is not None
        flat = self.unsharded_grad[segment.offset : segment.offset + segment.numel]
        # Each gradient is converted to the flat gradient's dtype on its own and dropped, so a second full gradient of
        # the unit, in param_dtype, never exists.
        with torch.no_grad():
            if index in self._filled:
                ops.accumulate_(flat, param.grad.reshape(-1))
            else:
                flat.copy_(param.grad.reshape(-1))
        param.grad = None
        self._filled.add(index)
        self._arrived.add(index)
        return self.grads_arrived

    def _open_grads(self, *, sums_locally: bool) -> None:
        """Allocate the full gradient; a no-op if it exists. Waits for a reduction under way, which still reads it."""
        if self.grad_state is GradState.REDUCING:
            self.wait_reduce()
        self._move_grad(GradState.LOCAL)
        if self.unsharded_grad is not None:
            return
        keeps_full = self._plan.grads is Partition.REPLICATED
        dtype = self._grad_dtype if keeps_full or sums_locally else self._reduce_dtype
        self.unsharded_grad = self._empty(self.layout.padded_numel, dtype)
        for start, stop in self.layout.gaps:
            self.unsharded_grad[start:stop].zero_()  # padding takes part in the reduction and in the norm

    def reduce_grad(self) -> None:
        """Start summing the full gradients over the ranks into this rank's shard. Does not block.

        Parameters without a gradient count as zero, because every rank must issue the same collectives.
        """
        if not self.trainable:
            return
        self._open_grads(sums_locally=False)
        assert self.unsharded_grad is not None
        for index, segment in enumerate(self.layout.segments):
            if index not in self._filled:
                self.unsharded_grad[segment.offset : segment.offset + segment.numel].zero_()
        self._filled.clear()
        self._arrived.update(range(len(self.params)))  # so that `take_grad` refuses gradients that come too late
        self._move_grad(GradState.REDUCING)
        full = self.unsharded_grad.to(self._reduce_dtype)  # the same tensor if the dtypes agree
        self._reduce_out = self._reduction_target(full)
        self._reducing = self._collectives.reduce(full, self._reduce_out, self.name)

    def _reduction_target(self, full: torch.Tensor) -> torch.Tensor:
        """[S] reduce_dtype, the output of the reduction.

        A slice of `full` if the plan keeps full gradients or the shard is all of `full`; otherwise a separate tensor,
        because it outlives `full`.
        """
        if self._plan.grads is Partition.REPLICATED or self._collectives.shard_count == 1:
            return self._own_slice(full)
        return self._empty(self.layout.shard_numel, self._reduce_dtype)

    def wait_reduce(self) -> None:
        """Block until grad_shard holds the sum over the ranks; frees the full gradient if the plan shards gradients."""
        if self._reducing is None:
            return
        self._reducing.wait()
        assert self._reduce_out is not None
        assert self.unsharded_grad is not None
        # Kept full gradients are reduced once a step. Sharded ones may be reduced in each backward, so they accumulate.
        if self._plan.grads is Partition.REPLICATED:
            self.grad_shard = self._own_slice(self.unsharded_grad)
            if self.grad_shard.dtype != self._reduce_out.dtype:
                self.grad_shard.copy_(self._reduce_out)
        elif self.grad_shard is None:
            self.grad_shard = self._reduce_out.to(self._grad_dtype)
        else:
            ops.accumulate_(self.grad_shard, self._reduce_out)
        if self._plan.grads is Partition.SHARDED:
            self.unsharded_grad = None
        self._reducing = self._reduce_out = None
        self._move_grad(GradState.REDUCED)

    # ---- step --------------------------------------------------------------------------------------------------

    def send_grad(self) -> None:
        """Send grad_shard to where the update runs. Call it when grad_shard is complete for this step."""
        if self._location is not ON_DEVICE:
            self._squares = self.grad_squares()  # while the gradient is still on the device
            self._location.send_grad()
            self.grad_sent.set()

    def give_grad_away(self, elsewhere: torch.Tensor) -> None:
        """Replace grad_shard by `elsewhere` and release the previous shard and the full gradient."""
        self.grad_shard, self.unsharded_grad = elsewhere, None

    def grad_squares(self) -> torch.Tensor | None:
        """The sum of squares of this rank's part of the gradient (0-dim fp64 on the device); None without a gradient.

        See [Note: each element once] in optim/grad_norm.py.
        """
        if self._squares is not None or self.grad_shard is None:
            return self._squares
        part_numel = self.layout.shard_numel // self._collectives.replica_count
        part = self.grad_shard.narrow(0, self._collectives.replica_rank * part_numel, part_numel)
        return ops.sum_of_squares(part)

    def refresh_param_shard(self) -> None:
        """Round the updated master into param_shard; a no-op if they are the same tensor."""
        if self.master_shard is None or self.master_shard is self.param_shard:
            return
        if self.master_shard.device == self.param_shard.device:
            ops.cast_copy_(self.param_shard, self.master_shard)
        else:
            self.param_shard.copy_(self.master_shard)

    def free_grads(self) -> None:
        """Free the gradients of this step, reduced or not. Waits for a reduction under way."""
        self.wait_reduce()
        if self.grad_state is not GradState.EMPTY:
            self._move_grad(GradState.EMPTY)
        self._filled.clear()
        self.unsharded_grad = self.grad_shard = self._squares = None

    # ---- access to values --------------------------------------------------------------------------------------

    @property
    def weights_shard(self) -> torch.Tensor:
        """[S]: the shard that holds the weights: the master, or param_shard for frozen parameters.

        Waits for an update that is under way.
        """
        self.settle()
        return self.param_shard if self.master_shard is None else self.master_shard

    @property
    def names(self) -> list[str]:
        """The parameters' full names, in the order of the layout."""
        return [segment.name for segment in self.layout.segments]

    def drop_full(self) -> None:
        """Declare the full copy stale because the shards change from outside. Waits for a gather that reads them."""
        self._end_gather()
        if self.data_state is DataState.UNSHARDED:
            self._move_data(DataState.SHARDED)  # also for frozen units, which `reshard` leaves unsharded
            if self._plan.params is Partition.SHARDED:
                self.unsharded_param.untyped_storage().resize_(0)

    # ---- full tensors, for inspection and editing ----------------------------------------------------------------

    def full_of(self, shard: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gather a [S] tensor over the shards; returns it by parameter name, in the parameters' shapes. A collective.

        The result is a copy that the caller owns; its entries are views of one tensor.
        """
        full = torch.empty(self.layout.padded_numel, dtype=shard.dtype, device=self._device)
        self._collectives.all_gather_uncounted(full, shard.to(self._device))
        return {
            segment.name: full[segment.offset : segment.offset + segment.numel].view(segment.shape)
            for segment in self.layout.segments
        }

    def set_values(self, values: dict[str, torch.Tensor]) -> None:
        """Set some parameters to new full values, which must be the same on every rank; the full copy becomes stale."""
        self.drop_full()  # first, because a gather under way reads the shard
        with torch.no_grad():
            target = self.weights_shard
            for piece in self.layout.pieces(self._collectives.shard_rank):
                if piece.name in values:
                    part = values[piece.name].reshape(-1)[piece.start : piece.stop]
                    target[piece.shard_offset :][: part.numel()].copy_(part)
            self.refresh_param_shard()

    def read_values(self, source: TensorSource, names: Collection[str]) -> None:
        """Fill this rank's shard of the parameters in `names` from `source`; the full copy becomes stale.

        Reads only the ranges that the shard holds, READ_NUMEL elements at a time.
        """
        if not any(segment.name in names for segment in self.layout.segments):
            return
        self.drop_full()  # first, because a gather under way reads the shard
        with torch.no_grad():
            for piece in self.layout.pieces(self._collectives.shard_rank):
                start = piece.start
                part = self.weights_shard[piece.shard_offset :][: piece.stop - start]
                for block in part.split(READ_NUMEL) if piece.name in names else ():
                    block.copy_(source.read(piece.name, start, start + block.numel()))
                    start += block.numel()
            self.refresh_param_shard()

    def first_non_finite(self) -> str | None:
        """The first parameter, in the unit's order, whose unreduced local gradient is not finite; None if all are.

        Reads on the host.
        """
        if self.unsharded_grad is None:
            return None
        for index, segment in enumerate(self.layout.segments):
            values = self.unsharded_grad[segment.offset : segment.offset + segment.numel]
            if index in self._filled and not bool(torch.isfinite(values).all()):
                return segment.name
        return None

    def free(self) -> None:
        """Release every tensor; the parameters become empty."""
        self.wait_reduce()
        self._end_gather()
        empty = torch.empty(0, dtype=self._compute_dtype, device=self._device)
        with torch.no_grad():
            for param in self.params:
                param.grad = None
                param.data = empty
        self.unsharded_grad = self.grad_shard = self.master_shard = None
        self.unsharded_param = self.param_shard = empty

    # ---- helpers -----------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Live flat tensors by component, for counting. Aliases share a storage; the caller must count each once."""
        return {
            "params": [self.unsharded_param, self.param_shard],
            "grads": [grad for grad in (self.unsharded_grad, self.grad_shard) if grad is not None],
            "optimizer": [] if self.master_shard is None else [self.master_shard],
        }

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _own_slice(self, full: torch.Tensor) -> torch.Tensor:
        start, stop = self.layout.shard_range(self._collectives.shard_rank)
        return full[start:stop]

    def _move_data(self, to: DataState) -> None:
        if (self.data_state, to) not in _DATA_MOVES:
            raise UnitStateError(f"unit {self.name}: parameters cannot go from {self.data_state.value} to {to.value}")
        self.data_state = to
        if to is DataState.SHARDED and self._guard is not None:
            self._guard.close()

    def _move_grad(self, to: GradState) -> None:
        if (self.grad_state, to) not in _GRAD_MOVES:
            raise UnitStateError(f"unit {self.name}: gradients cannot go from {self.grad_state.value} to {to.value}")
        self.grad_state = to
