"""A unit: parameters that are gathered, reduced and released together, and what the rest of the runtime does with it.

P = elements of the unit, padded; S = P / shard count. The flat tensors, in the order in which values pass through them:
master_shard [S] -> param_shard [S] -> unsharded_param [P] -> unsharded_grad [P] -> grad_shard [S] -> master_shard.
unit_parameters.py owns those of the parameters, unit_gradients.py those of the gradients. Other files only see shards
(the optimizer, the offload tiers, checkpoints) or named parameters; the full flat tensors are private to these files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import nn

from zero_runtime.collectives import Collectives
from zero_runtime.errors import UnitStateError
from zero_runtime.flat_layout import FlatLayout
from zero_runtime.guarded_parameter import ClosedGuard, ParameterGuard
from zero_runtime.initial_values import InitialValues
from zero_runtime.plan import Phase, ZeroPlan
from zero_runtime.shard_location import ON_DEVICE, OffloadedShards
from zero_runtime.tensor_source import ReadInto, TensorSource, read_in_blocks, reads_from
from zero_runtime.unit_gradients import UnitGradients
from zero_runtime.unit_parameters import DataState, UnitParameters
from zero_runtime.unit_planner import UnitSpec
from zero_runtime.wings import STORED_CODES, load
from zero_runtime.wire import EXACT, Wire


class Unit:
    """One unit on one rank."""

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        plan: ZeroPlan,
        collectives: Collectives,
        device: torch.device,
        *,
        micro_batches: int,
        offloaded: OffloadedShards | None = None,
        wire: Wire = EXACT,
    ) -> None:
        self.name = spec.name
        self.modules = spec.modules
        self.trainable = spec.trainable
        self.shared = spec.shared
        self.matrices = spec.matrices  # parameters that the optimizer updates whole
        self.sums_gradients = micro_batches > 1 or spec.shared  # several gradients of a parameter may arrive in a step
        self.precision = spec.precision
        self.device = device  # that the unit computes on, wherever its shards are stored
        self.uses = 0  # running calls of modules that read the parameters
        self.slices = spec.slices
        self.full_shapes = {name: tuple(param.shape) for name, param in spec.params}
        self.layout = layout
        self._collectives = collectives
        made: type[UnitParameters] = load(STORED_CODES) if spec.is_coded else UnitParameters
        self.parameters = parameters = made(
            spec, layout, plan, collectives, device, offloaded or OffloadedShards(), wire
        )
        self._plan = parameters.plan
        self.gradients = UnitGradients(
            spec, layout, plan, collectives, device, spec.precision.grad(micro_batches), wire
        )
        self.params: list[nn.Parameter] = parameters.params
        # Whether a step discards a write to the full parameters, because updates start from another tensor.
        self.loses_writes = parameters.casts or (self.trainable and not parameters.master_is_param)

    # ---- initial values ----------------------------------------------------------------------------------------------

    def materialize(self, initial: InitialValues, given: Collection[str] = ()) -> None:
        """Give the parameters their initial values, except those in `given`, which have none until `read_values`.

        If the plan shards parameters, the full copy is freed immediately, so at most one unit is unsharded while a
        model is built. Call it after all units have allocated their shards: a shard allocated between two calls would
        split the memory that the first unit's full copy freed, and the second unit's full copy would not fit into it.
        """
        self.parameters.materialize(initial, given)
        self.reshard(Phase.BACKWARD)

    # ---- full parameters ---------------------------------------------------------------------------------------------

    def begin_use(self) -> None:
        """Record that a call that reads the parameters has begun."""
        self.uses += 1

    def end_use(self) -> None:
        """Record that a call that reads the parameters has ended."""
        self.uses -= 1

    def begin_fetch(self) -> None:
        """Start copying offloaded parameters to the device; a no-op for all others. Does not block."""
        if self.parameters.state is DataState.STALE:
            self.parameters.location.begin_fetch()

    def unshard(self) -> None:
        """Start gathering the full parameters. Does not block; a no-op unless STALE."""
        if self.parameters.state is DataState.STALE:
            self.parameters.start_gather()

    def wait_unshard(self) -> None:
        """Block until the full parameters may be used, starting the gather if necessary, and open the guard."""
        self._collectives.journal.enter(self.name)
        self.unshard()
        self.parameters.end_gather()
        self.parameters.open_guard()

    def renew(self) -> None:
        """Start gathering a full copy that is kept between steps, or exchanging parameters between shard groups, after
        the shards have changed.

        All ranks must call it for all units in the same order. A no-op if the plan frees full copies, or if the unit's
        update runs elsewhere and may still be under way; an exchange waits for that update, because ranks may use
        units in another order than those of other groups. Else it blocks only if the gather needs a separate buffer.

        The end of a step calls it, not the next forward: a parameter read between two steps would otherwise have old
        values, and a gather that the read itself starts would hang if only one rank reads.
        """
        if self.parameters.group_shard is not None:
            self.parameters.renew_group()
        if not self._plan.keeps_full_params or self.parameters.location is not ON_DEVICE:
            return
        self.unshard()
        if self.parameters.casts:  # gathered into a separate buffer: at most one may exist at a time
            self.parameters.end_gather()

    def complete(self) -> None:
        """Make the full copy current before `free`, if the plan keeps it or all of it is in this rank's memory.

        A collective if the plan keeps it and it is stale.
        """
        parameters = self.parameters
        alone = self._collectives.shard_count == 1 and not (parameters.params_offloaded or parameters.is_coded)
        if self._plan.keeps_full_params or alone:
            self.unshard()
        parameters.end_gather()

    def wait_renewed(self) -> None:
        """Block until what `renew` started has ended. Training needs no call of it. Measurements do: what is sent
        between two timed steps would be in the time of neither. Starts nothing."""
        self.parameters.end_gather()
        self.parameters.end_exchange(stale=False)

    def wait_current(self) -> bool:
        """Wait for a gather under way; return whether the full parameters hold this step's values.

        Never starts a gather in which other ranks must take part.
        """
        if self._plan.keeps_full_params and self._collectives.shard_count == 1:
            self.unshard()  # a shard group of one rank: sends nothing, so the other ranks need not take part
        self.parameters.end_gather()
        return self.parameters.state is DataState.UNSHARDED

    def reshard(self, after: Phase) -> None:
        """Declare the full parameters unused after this phase; the plan decides whether they are freed or become stale.

        Waits for a gather under way. A no-op while STALE.
        """
        parameters = self.parameters
        parameters.end_gather()
        if parameters.group_shard is not None:
            parameters.end_exchange(stale=self.trainable and after is Phase.STEP)
        if parameters.state is not DataState.UNSHARDED or not self._plan.releases_params_after(after):
            return
        if not self.trainable and self._plan.keeps_full_params:
            return  # a step does not change frozen parameters, so their full copy is never stale
        parameters.make_stale()

    def drop_full(self) -> None:
        """Declare the full copy stale because the shards change from outside. Waits for a gather that reads them.

        Also for frozen units, which `reshard` may leave unsharded.
        """
        self.parameters.end_gather()
        self.parameters.end_exchange(stale=True)
        if self.parameters.state is DataState.UNSHARDED:
            self.parameters.make_stale()

    def guard_with(self, guard: ParameterGuard | None) -> None:
        """Install a guard that closes the parameters whenever the full copy is freed or stale; None removes it."""
        self.parameters.guard_with(guard)

    def name_of(self, param: nn.Parameter) -> str:
        """The full name of one of this unit's parameters."""
        return next(segment.name for segment, own in self.parameters.placed() if own is param)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def local_grad(self, name: str) -> torch.Tensor | None:
        """This rank's own gradient of one parameter while it waits for its reduction, else None; may be a view."""
        found = self.gradients.local(name)
        return None if found is None else self.slices.join(*found)

    def begin_backward(self) -> None:
        """Accept gradients again, after the reduction of an earlier backward."""
        self.gradients.begin_backward()

    def reopen_grad(self) -> None:
        """Let another backward add to the reduced gradients of this step. Waits for copies of them."""
        self.settle()
        self.gradients.reopen()

    def take_grad(self, index: int, *, sums_locally: bool) -> None:
        """Move `params[index].grad` into the flat gradient.

        `sums_locally`: later micro-batches add to the flat gradient before it is reduced.
        """
        param = self.params[index]
        name = self.layout.segments[index].name
        assert param.grad is not None, f"unit {self.name}: no gradient for {name}"
        if self.parameters.state is DataState.STALE:
            raise UnitStateError(
                f"unit {self.name}: a gradient for {name} came while its parameters were "
                "released or stale, so something read them without calling the module that owns them; call the "
                "module, or give the parameter to a module that is called"
            )
        if name in self.slices.summed:  # each rank of the tensor-parallel group computed a term of it
            param.grad = self.slices.axis.sum_(param.grad.contiguous())
        self.gradients.take(index, param.grad, sums_locally=sums_locally)
        param.grad = None

    def reduce_grad(self) -> None:
        """Start summing the full gradients over the ranks into this rank's shard. Does not block; a no-op if frozen.

        Parameters without a gradient count as zero, because every rank must issue the same collectives.
        """
        if self.trainable:
            self.gradients.reduce()

    @property
    def waits_late(self) -> bool:
        """Whether a reduction may be waited for at the end of a backward: it holds no memory that would be freed."""
        return self.gradients.holds_nothing and self.parameters.location is ON_DEVICE

    def wait_reduce(self) -> None:
        """Block until grad_shard holds the sum over the ranks; frees the full gradient if the plan shards gradients."""
        self.gradients.wait_reduce()

    def send_grad(self) -> None:
        """Send grad_shard to where the update runs. Call it when grad_shard is complete for this step."""
        if self.parameters.location is not ON_DEVICE:
            self.gradients.keep_squares()  # for the norm, while the gradient is still on the device
            self.parameters.location.send_grad()

    # ---- shards: named as in offload.tier.Shards, which a tier lends in place of a unit ------------------------------

    @property
    def param_shard(self) -> torch.Tensor:
        """[S] param_dtype: the shard that is gathered."""
        return self.parameters.param_shard

    @property
    def master_shard(self) -> torch.Tensor | None:
        """[S] master_dtype: the shard that the optimizer updates; None for a frozen unit."""
        return self.parameters.master_shard

    @property
    def grad_shard(self) -> torch.Tensor | None:
        """[S] grad_dtype: this rank's part of the gradient that is summed over the ranks."""
        return self.gradients.grad_shard

    @property
    def weights_shard(self) -> torch.Tensor:
        """[S]: the shard that holds the weights: the master, or param_shard for frozen parameters; for codes, their
        values in fp32, a copy.

        Waits for an update that is under way.
        """
        self.settle()
        return self.parameters.weights

    def settle(self) -> None:
        """Block until no update or copy of the shards is under way."""
        self.parameters.location.settle()

    # ---- values by parameter -----------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The parameters' full names, in the order of the layout."""
        return [segment.name for segment in self.layout.segments]

    def full_of(self, shard: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gather a [S] tensor over the shards; returns it by parameter name, in the full shapes. A collective.

        The result is a copy that the caller owns; its entries may be views of one tensor.
        """
        full = torch.empty(self.layout.padded_numel, dtype=shard.dtype, device=self.device)
        self._collectives.all_gather_uncounted(full, shard.to(self.device))
        return {segment.name: self.slices.join(segment, segment.of(full)) for segment in self.layout.segments}

    def fill_weights(self, names: Sequence[str], read_into: ReadInto) -> None:
        """Fill this rank's shard of the parameters in `names`; the full copy becomes stale."""
        if not names:
            return
        self.drop_full()  # first, because a gather under way reads the shard
        self.settle()
        with torch.no_grad():
            self.parameters.fill_weights(names, read_into)

    def set_values(self, values: dict[str, torch.Tensor]) -> None:
        """Set some parameters to new full values, which must be the same on every rank; the full copy becomes stale."""
        self.fill_weights(list(values), reads_from(values))

    def read_values(self, source: TensorSource, names: Collection[str]) -> None:
        """Like `fill_weights`, from `source`, of which only the ranges that the shard holds are read."""
        self.fill_weights([name for name in self.names if name in names], partial(read_in_blocks, source))

    # ---- counting and freeing ----------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Live flat tensors by component, for counting. Aliases share a storage; the caller must count each once."""
        parameters, gradients = self.parameters, self.gradients
        grads = (gradients.unsharded_grad, gradients.grad_shard, *gradients.kept)
        return {
            "params": [parameters.unsharded_param, parameters.param_shard],
            "grads": [one for one in grads if one is not None],
            "optimizer": [] if parameters.master_shard is None else [parameters.master_shard],
        }

    def message_tensors(self) -> list[torch.Tensor]:
        """Tensors of collectives under way. Those that are states too are in `state_tensors`."""
        gather = self.parameters.gather
        return [*([] if gather is None else [gather.shard, gather.full]), *self.gradients.message_tensors()]

    def free(self) -> None:
        """Free every tensor. Parameters become tensors of their own if their full values are here, else reads raise."""
        self.gradients.free()
        self.gradients.coded = None  # it keeps errors between steps
        if not self.parameters.free():
            ClosedGuard({segment.name: param for segment, param in self.parameters.placed()})
