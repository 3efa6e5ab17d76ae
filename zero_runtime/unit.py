"""One unit's bytes: its flat tensors, who aliases whom, and the two state machines that guard them.

[Note: flat tensors]
P = elements of the unit, padded; S = P / shard count. One name for each tensor, in the order of a parameter's way:
master_shard [S] -> param_shard [S] -> unsharded_param [P] -> unsharded_grad [P] -> grad_shard [S] -> master_shard.
No flat tensor is shown outside this file but to the optimizer and the norm; everything else speaks of parameters.

[Note: release by storage]
Tensors that autograd saved for backward alias unsharded_param's storage. So a release frees the storage itself
(resize to 0) and the next gather refills the same one; a new tensor would leave the saved ones with stale memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum

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
from zero_runtime.shard_location import ON_DEVICE, Rests, ShardLocation
from zero_runtime.tensor_source import TensorSource
from zero_runtime.unit_planner import UnitSpec

READ_NUMEL = 4 << 20  # elements read from a source at a time: bounds the memory beside the shards


class DataState(Enum):
    """Where the parameters are: only this rank's shard is current, a gather is under way, or all are current."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class GradState(Enum):
    """Where the gradients are: none, this rank's own, being reduced, or this rank's shard of the sum."""

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
    """The tensors of one unit on one rank. It alone allocates, fills and frees them."""

    def __init__(
        self,
        spec: UnitSpec,
        plan: ZeroPlan,
        collectives: Collectives,
        device: torch.device,
        *,
        micro_batches: int,
        rests: Rests | None = None,
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
        self._arrived: set[int] = set()  # parameters whose gradient came in the backward under way
        self.unsharded_grad: torch.Tensor | None = None  # [P] grad_dtype (R grads) or reduce_dtype (S grads)
        self.grad_shard: torch.Tensor | None = None  # [S] grad_dtype
        self._squares: torch.Tensor | None = None  # of a gradient that has left, see `grad_squares`
        self._unbound: list[tuple[nn.Parameter, torch.Tensor]] = []  # drawn, and not yet bound to their views
        self._rests = rests or Rests()
        self._place: ShardLocation = ON_DEVICE
        self._guard: ParameterGuard | None = None
        self._allocate()

    # ---- initial values -----------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Decide every alias between flat tensors; nowhere else is one made.

        Replicated parameters: param_shard is this rank's slice of unsharded_param, which lives on. Sharded ones:
        param_shard is a tensor of its own, since what outlives a release must not share its storage. So it is where
        compute and param dtype differ and unsharded_param is a cast of what was gathered.
        The master is param_shard itself where their dtypes agree, and does not exist for frozen parameters.
        What rests elsewhere has no memory here; a tier binds it while it is needed.
        """
        self.unsharded_param = self._empty(self.layout.padded_numel, self._compute_dtype)  # [P]
        if self._plan.params is Partition.REPLICATED and self._compute_dtype == self._param_dtype:
            self.param_shard = self._own_slice(self.unsharded_param)  # [S]
        elif self.params_rest:
            self.param_shard = self._empty(0, self._param_dtype)
        else:
            self.param_shard = self._empty(self.layout.shard_numel, self._param_dtype)  # [S]
        if self._plan.params is Partition.SHARDED:
            self.unsharded_param.untyped_storage().resize_(0)  # nothing is whole before `materialize`
        self.master_shard: torch.Tensor | None = None  # [S]
        if self.trainable and not self.master_is_param:
            self.master_shard = self._empty(0 if self.master_rests else self.layout.shard_numel, self._master_dtype)
        elif self.trainable:
            self.master_shard = self.param_shard

    # ---- what rests elsewhere ------------------------------------------------------------------------------------

    @property
    def params_rest(self) -> bool:
        """Whether param_shard has no memory here between its uses."""
        return self._rests.params

    @property
    def states_rest(self) -> bool:
        """Whether the optimizer's states have none."""
        return self._rests.optimizer and self.trainable

    @property
    def master_is_param(self) -> bool:
        """Whether master_shard is param_shard itself: where dtype and memory agree."""
        parted = self._rests.apart and self._rests.optimizer and not self._rests.params
        return self.trainable and self._master_dtype == self._param_dtype and not parted

    @property
    def master_rests(self) -> bool:
        """Whether the master has none; one that is param_shard itself goes where that goes."""
        return self.states_rest and not self.master_is_param

    def settle(self) -> None:
        """Block until no update or copy of the shards is under way."""
        self._place.settle()

    @property
    def device(self) -> torch.device:
        """Where it computes, whatever rests elsewhere."""
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

    def rest_in(self, place: ShardLocation) -> None:
        """Shards of this unit rest there from here on."""
        self._place = place

    def bind_shards(self, param: torch.Tensor | None, master: torch.Tensor | None) -> None:
        """Take what is not None for its shards: memory of a tier, which keeps it, or nothing at all."""
        if param is not None:
            self.param_shard = param
            self.master_shard = param if self.master_is_param else self.master_shard
        if master is not None:
            self.master_shard = master

    def begin_fetch(self) -> None:
        """Parameters that rest elsewhere set out; nothing for all others. Does not block."""
        if self.data_state is DataState.SHARDED:
            self._place.begin_fetch()

    def materialize(self, initial: InitialValues, given: Collection[str] = ()) -> None:
        """Take the parameters' values and make them views of unsharded_param; their old storages end here.

        Parameters on the meta device are drawn one at a time, so that no more than one exists beside the unit; those
        that are `given` have no values until `read_values`. The master shard is taken before the values are rounded to
        param_dtype. Where the plan shards parameters the full copy ends at once: no more than one unit is whole while
        a model is built. Call it when every unit has its shards: one allocated between two units would split the hole
        that the first one left, and the next would not fit into it.
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
                    # Rebinding .data keeps the parameter's identity and gives the view a version counter of its own,
                    # so refilling the flat tensor does not look to autograd like a write to a saved tensor.
                    param.data = view
            own = self._own_slice(self.unsharded_param)
            if self.param_shard.data_ptr() != own.data_ptr():
                self.param_shard.copy_(own)
            if self._compute_dtype != self._param_dtype:  # compute with what a gather would give, rounded alike
                self.unsharded_param.copy_(self.unsharded_param.to(self._param_dtype))
        self.reshard(Phase.BACKWARD)

    def bind_initialized(self) -> None:
        """Bind the parameters that were drawn; call it when all units have drawn theirs. Idempotent.

        Not before: what draws one parameter must find all others on the meta device (initial_values.py). A meta
        parameter refuses a new .data, so its content is swapped, which keeps its identity for whoever holds it.
        """
        for param, view in self._unbound:
            real = nn.Parameter(view.new_empty(0), requires_grad=param.requires_grad)
            real.data = view
            swap_content(param, real)
        self._unbound.clear()

    def placed(self) -> Iterator[tuple[Segment, nn.Parameter]]:
        """Each parameter with its place, in the order of the layout."""
        return zip(self.layout.segments, self.params, strict=True)

    def _handed_over(self, param: nn.Parameter) -> torch.Tensor:
        """The values that the model came with: rank 0's, since ranks that seeded differently would train apart."""
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
            fetched = self._place.fetch()
            self._gathered_from = self.param_shard if fetched is None else fetched
            self._fill_storage()
            self._gathered = self.unsharded_param
            if self._compute_dtype != self._param_dtype:
                self._gathered = self._empty(self.layout.padded_numel, self._param_dtype)
            self._gathering = self._collectives.all_gather(self._gathered, self._gathered_from, self.name)

    def _fill_storage(self) -> None:
        """Take memory for the full parameters; a no-op while there is some. See [Note: release by storage]."""
        storage = self.unsharded_param.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.layout.padded_numel * self.unsharded_param.element_size())

    def wait_unshard(self) -> None:
        """Block until the full parameters may be used; starts the gather if nobody has. Opens the parameters."""
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
            self._place.drop()
            self._move_data(DataState.UNSHARDED)

    def guard_with(self, guard: ParameterGuard | None) -> None:
        """Have the parameters closed from here on whenever the full ones end or become stale; None: never again."""
        if self._guard is not None:
            self._guard.open()
        self._guard = guard

    def renew(self) -> None:
        """The shards are new: start gathering a full copy that is kept between steps. All ranks, in one order.

        A no-op where the plan frees full copies, and where the update runs elsewhere and may still be under way.
        """
        if self._plan.params is not Partition.REPLICATED or self._place is not ON_DEVICE:
            return
        self.unshard()
        if self._gathered is not self.unsharded_param:  # a second buffer, of which there should be one at a time
            self._end_gather()

    def wait_current(self) -> bool:
        """Block until the full parameters hold this step's values; False, at once, where that needs the other ranks."""
        if self._plan.params is Partition.REPLICATED and self._collectives.shard_count == 1:
            self.unshard()  # sends nothing
        self._end_gather()
        return self.data_state is DataState.UNSHARDED

    @property
    def loses_writes(self) -> bool:
        """Whether a write to the full parameters ends with the next step: they are not what an update starts from."""
        return self._compute_dtype != self._param_dtype or (self.trainable and not self.master_is_param)

    def begin_use(self) -> None:
        """A call that reads the parameters has begun."""
        self.uses += 1

    def end_use(self) -> None:
        """A call that reads the parameters has ended."""
        self.uses -= 1

    def name_of(self, param: nn.Parameter) -> str:
        """The full name of one of this unit's parameters."""
        places = (place for place, own in enumerate(self.params) if own is param)
        return self.layout.segments[next(places)].name

    def reshard(self, after: Phase) -> None:
        """Declare the full parameters done with; the plan decides whether anything ends. No-op while SHARDED."""
        self._end_gather()
        if self.data_state is not DataState.UNSHARDED or not self._plan.releases_params_after(after):
            return
        if not self.trainable and self._plan.params is Partition.REPLICATED:
            return  # a step does not change it, so its full copy is never stale
        self._move_data(DataState.SHARDED)
        if self._plan.params is Partition.SHARDED:
            self.unsharded_param.untyped_storage().resize_(0)  # see [Note: release by storage]

    # ---- gradients ---------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward starts: none of its gradients has come yet."""
        self._arrived.clear()

    @property
    def grads_arrived(self) -> bool:
        """Whether every parameter's gradient has come in the backward under way."""
        return len(self._arrived) == len(self.params)

    def take_grad(self, index: int, *, sums_locally: bool) -> bool:
        """Move `params[index].grad` into the flat gradient. True when every parameter's has come in this backward.

        `sums_locally`: the flat gradient will be added to by later micro-batches before it is reduced.
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
        """Make room for full gradients; a no-op while there is some."""
        if self.grad_state is GradState.REDUCING:
            self.wait_reduce()
        self._move_grad(GradState.LOCAL)
        if self.unsharded_grad is not None:
            return
        keeps_full = self._plan.grads is Partition.REPLICATED
        dtype = self._grad_dtype if keeps_full or sums_locally else self._reduce_dtype
        self.unsharded_grad = self._empty(self.layout.padded_numel, dtype)
        for start, stop in self.layout.gaps:
            self.unsharded_grad[start:stop].zero_()  # summed and squared with the rest

    def reduce_grad(self) -> None:
        """Start summing the full gradients over the ranks into this rank's shard. Does not block.

        Parameters that took no part count as zero: every rank must issue the same collectives.
        """
        if not self.trainable:
            return
        self._open_grads(sums_locally=False)
        assert self.unsharded_grad is not None
        for index, segment in enumerate(self.layout.segments):
            if index not in self._filled:
                self.unsharded_grad[segment.offset : segment.offset + segment.numel].zero_()
        self._filled.clear()
        self._arrived.update(range(len(self.params)))  # in this backward, what comes now is late
        self._move_grad(GradState.REDUCING)
        full = self.unsharded_grad.to(self._reduce_dtype)  # the same tensor where the dtypes agree
        self._reduce_out = self._reduction_target(full)
        self._reducing = self._collectives.reduce(full, self._reduce_out, self.name)

    def _reduction_target(self, full: torch.Tensor) -> torch.Tensor:
        """[S] reduce_dtype. In place where the full gradient lives on, else of its own: it outlives the full one."""
        if self._plan.grads is Partition.REPLICATED or self._collectives.shard_count == 1:
            return self._own_slice(full)
        return self._empty(self.layout.shard_numel, self._reduce_dtype)

    def wait_reduce(self) -> None:
        """Block until grad_shard holds the sum over the ranks; frees the full gradient where the plan shards it."""
        if self._reducing is None:
            return
        self._reducing.wait()
        assert self._reduce_out is not None
        assert self.unsharded_grad is not None
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
        """grad_shard is complete: this step adds no more to it. It leaves if the update runs elsewhere."""
        if self._place is not ON_DEVICE:
            self._squares = self.grad_squares()
            self._place.send_grad()

    def give_grad_away(self, elsewhere: torch.Tensor) -> None:
        """grad_shard is `elsewhere` from here on; what it was, whole or not, ends here."""
        self.grad_shard, self.unsharded_grad = elsewhere, None

    def grad_squares(self) -> torch.Tensor | None:
        """0-dim fp64 on the device: the sum of the squares of this rank's part of the gradient; None without one.

        See [Note: each element once] in optim/grad_norm.py.
        """
        if self._squares is not None or self.grad_shard is None:
            return self._squares
        part_numel = self.layout.shard_numel // self._collectives.replica_count
        part = self.grad_shard.narrow(0, self._collectives.replica_rank * part_numel, part_numel)
        return ops.sum_of_squares(part)

    def refresh_param_shard(self) -> None:
        """Round the updated master into param_shard; a no-op where they are one tensor."""
        if self.master_shard is None or self.master_shard is self.param_shard:
            return
        if self.master_shard.device == self.param_shard.device:
            ops.cast_copy_(self.param_shard, self.master_shard)
        else:
            self.param_shard.copy_(self.master_shard)

    def free_grads(self) -> None:
        """End the gradients of this step, reduced or not."""
        self.wait_reduce()
        if self.grad_state is not GradState.EMPTY:
            self._move_grad(GradState.EMPTY)
        self._filled.clear()
        self.unsharded_grad = self.grad_shard = self._squares = None

    # ---- values from outside -----------------------------------------------------------------------------------

    @property
    def weights_shard(self) -> torch.Tensor:
        """[S]: what the weights are kept in: the master, or the parameters themselves where they are frozen. Waits for
        an update that is under way."""
        self.settle()
        return self.param_shard if self.master_shard is None else self.master_shard

    @property
    def names(self) -> list[str]:
        """The parameters' full names, in the order of the layout."""
        return [segment.name for segment in self.layout.segments]

    def drop_full(self) -> None:
        """Declare the full copy stale: the shards are written from outside. Waits for a gather that reads them."""
        self._end_gather()
        if self.data_state is DataState.UNSHARDED:
            self._move_data(DataState.SHARDED)  # also where a step would leave it alone
            if self._plan.params is Partition.SHARDED:
                self.unsharded_param.untyped_storage().resize_(0)

    # ---- whole tensors, for people who look or edit -------------------------------------------------------------

    def full_of(self, shard: torch.Tensor) -> dict[str, torch.Tensor]:
        """The whole parameters' worth of a [S] tensor, by parameter name in the parameters' shapes. A collective.

        The result is the caller's: a copy.
        """
        full = torch.empty(self.layout.padded_numel, dtype=shard.dtype, device=self._device)
        self._collectives.all_gather_uncounted(full, shard.to(self._device))
        return {
            segment.name: full[segment.offset : segment.offset + segment.numel].view(segment.shape)
            for segment in self.layout.segments
        }

    def set_values(self, values: dict[str, torch.Tensor]) -> None:
        """Take new whole values for some parameters, the same on every rank; the full copy becomes stale."""
        self.drop_full()  # first: a gather under way reads the shard
        with torch.no_grad():
            target = self.weights_shard
            for piece in self.layout.pieces(self._collectives.shard_rank):
                if piece.name in values:
                    part = values[piece.name].reshape(-1)[piece.start : piece.stop]
                    target[piece.shard_offset :][: part.numel()].copy_(part)
            self.refresh_param_shard()

    def read_values(self, source: TensorSource, names: Collection[str]) -> None:
        """Fill this rank's shards of those of its parameters that are in `names`; the full copy becomes stale.

        Reads the ranges of the shards and nothing else, a block at a time.
        """
        if not any(segment.name in names for segment in self.layout.segments):
            return
        self.drop_full()  # first: a gather under way reads the shard
        with torch.no_grad():
            for piece in self.layout.pieces(self._collectives.shard_rank):
                start = piece.start
                part = self.weights_shard[piece.shard_offset :][: piece.stop - start]
                for block in part.split(READ_NUMEL) if piece.name in names else ():
                    block.copy_(source.read(piece.name, start, start + block.numel()))
                    start += block.numel()
            self.refresh_param_shard()

    def first_non_finite(self) -> str | None:
        """The first parameter, in the unit's order, whose own unreduced gradient is not finite. Reads on the host."""
        if self.unsharded_grad is None:
            return None
        for index, segment in enumerate(self.layout.segments):
            values = self.unsharded_grad[segment.offset : segment.offset + segment.numel]
            if index in self._filled and not bool(torch.isfinite(values).all()):
                return segment.name
        return None

    def free(self) -> None:
        """Let every tensor go; the parameters become empty."""
        self.wait_reduce()
        self._end_gather()
        empty = torch.empty(0, dtype=self._compute_dtype, device=self._device)
        with torch.no_grad():
            for param in self.params:
                param.grad = None
                param.data = empty
        self.unsharded_grad = self.grad_shard = self.master_shard = None
        self.unsharded_param = self.param_shard = empty

    # ---- small parts -------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Live flat tensors by component, for counting; aliases are the caller's to fold (by storage)."""
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
