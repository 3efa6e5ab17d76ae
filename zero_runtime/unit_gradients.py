"""The flat gradient tensors of one unit: their memory, their sums over micro-batches and over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from zero_runtime.collectives import Collectives, Pending
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import UnitStateError
from zero_runtime.flat_layout import FlatLayout, Segment
from zero_runtime.kernels import ops
from zero_runtime.plan import ZeroPlan
from zero_runtime.unit_planner import UnitSpec
from zero_runtime.wings import QUANTISED_SUMS, load
from zero_runtime.wire import EXACT, Wire


class GradState(Enum):
    """State of the gradients: none, local and unreduced, being reduced, or reduced to this rank's shard of the sum."""

    EMPTY = "empty"
    LOCAL = "local"
    REDUCING = "reducing"
    REDUCED = "reduced"

    __hash__ = object.__hash__  # that of Enum is a Python function, called at every change of a state


_NEXT = {
    GradState.EMPTY: (GradState.LOCAL,),
    GradState.LOCAL: (GradState.LOCAL, GradState.REDUCING, GradState.EMPTY),
    GradState.REDUCING: (GradState.REDUCED,),
    GradState.REDUCED: (GradState.LOCAL, GradState.EMPTY),
}


class Reduction(NamedTuple):
    """A reduction under way, and its result `out` [S] reduce_dtype.

    received: with quantised reductions, the codes and scales that each rank of the shard group sends, after each other.
    """

    pending: Pending
    out: torch.Tensor
    received: torch.Tensor | None = None


class UnitGradients:
    """The gradient tensors of one unit on one rank. Only this class allocates, fills and frees them.

    unsharded_grad [P]: this rank's own gradient, in grad_dtype if it is summed over micro-batches and else in
    reduce_dtype. grad_shard [S] grad_dtype: this rank's part of the sum over the ranks.
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        plan: ZeroPlan,
        collectives: Collectives,
        device: torch.device,
        dtype: str,
        wire: Wire = EXACT,
    ) -> None:
        self.name = spec.name
        self.layout = layout
        self.grad_dtype = TORCH_DTYPE[dtype]
        self.state = GradState.EMPTY
        self.unsharded_grad: torch.Tensor | None = None
        self.grad_shard: torch.Tensor | None = None
        self.reduced_in: torch.dtype | None = None  # of the last sum over the ranks, even if there is only one rank
        self._reduce_dtype = TORCH_DTYPE[spec.precision.reduce]
        self._collectives = collectives
        self._device = device
        self.coded: Any = None  # what sends terms as codes: quantised/sums.py
        if wire.reduce is not None and collectives.shard_count > 1:
            self.coded = load(QUANTISED_SUMS)(wire, spec.name, layout, collectives)
        self.sums_over_ranks = True  # else every rank keeps its own full gradient, of which grad_shard is a slice
        # Two aliases. If the plan keeps full gradients, grad_shard is this rank's slice of unsharded_grad. The result
        # of a reduction is a slice of its input then, or if the shard is all of it; otherwise it is a separate tensor,
        # because it outlives the input.
        self._keeps_full = plan.keeps_full_grads
        self._reduces_in_place = plan.keeps_full_grads or collectives.shard_count == 1
        # Whether a reduction reads and writes unsharded_grad alone, which stays.
        casts = self.grad_dtype != self._reduce_dtype
        self.holds_nothing = self._keeps_full and not casts and self.coded is None and collectives.sums_in_place
        self._filled: set[int] = set()  # parameters (by index) with a gradient in unsharded_grad
        # Each parameter's elements of unsharded_grad. One call makes all views, in less time than a slice for each.
        self._flats: Sequence[torch.Tensor] = ()
        self._sizes = _sizes(layout)
        # The ranges [start, stop) of the shard whose squares this rank adds; see [Note: each element once].
        part_numel = layout.shard_numel // collectives.replica_count
        low = collectives.replica_rank * part_numel
        pieces = layout.pieces(collectives.shard_rank)
        self._counted = spec.slices.counted(pieces, low, low + part_numel)
        self._closed = False  # reduced in the current backward, so that another gradient of it would be lost
        self._reducing: Reduction | None = None
        self._squares: torch.Tensor | None = None  # result of `squares`, kept for a gradient that was sent away
        self.earlier: torch.Tensor | None = None  # grad_shard of earlier backwards, see `reopen`

    # ---- local gradients ---------------------------------------------------------------------------------------------

    def sum_gradients(self, *, over_ranks: bool) -> None:
        """Whether gradients are summed over the ranks from the next backward on."""
        self.sums_over_ranks = over_ranks

    def begin_backward(self) -> None:
        """Accept gradients again."""
        self._closed = False

    def reopen(self) -> None:
        """Let another backward add to the reduced gradients of this step; they come back if they were sent away.

        A full gradient that is kept holds their sum over the ranks: its slice is set aside, because the next reduction
        overwrites it.
        """
        if self.state is not GradState.REDUCED or self.grad_shard is None:
            return
        self._squares = None  # of the sum so far, which grows
        if not self.sums_over_ranks:
            self._filled.update(range(len(self._flats)))
        elif self._keeps_full:
            self.earlier, self.grad_shard = self.grad_shard.to(self._device, copy=True), None
        else:
            self.grad_shard = self.grad_shard.to(self._device)

    def take(self, index: int, grad: torch.Tensor, *, sums_locally: bool) -> None:
        """Copy or add the gradient of parameter `index` into the flat gradient. See Unit.take_grad."""
        if self._closed:
            name = self.layout.segments[index].name
            raise UnitStateError(
                f"unit {self.name}: expected no gradient of {name} after the unit was reduced in this "
                "backward, found one, which would be lost: if a part of the model is checkpointed, use "
                "torch.utils.checkpoint with use_reentrant=False; compute a term of the weights after the forward"
            )
        # Only the first gradient of a backward finds another state or no tensor.
        if self.state is not GradState.LOCAL or self.unsharded_grad is None:
            self._open(sums_locally=sums_locally)
        flat = self._flats[index]
        # Each gradient is converted to the flat gradient's dtype on its own and dropped, so a second full gradient of
        # the unit, in param_dtype, never exists.
        if index in self._filled:
            ops.accumulate_(flat, grad.reshape(-1))
        else:
            flat.copy_(grad.reshape(-1))
        self._filled.add(index)

    def _open(self, *, sums_locally: bool) -> None:
        """Allocate the full gradient; a no-op if it exists. Waits for a reduction under way, which still reads it."""
        self.wait_reduce()
        self.move(GradState.LOCAL)
        if self.unsharded_grad is not None:
            return
        dtype = self.grad_dtype if self._keeps_full or sums_locally else self._reduce_dtype
        self._keep(self._empty(self.layout.padded_numel, dtype))
        assert self.unsharded_grad is not None
        for start, stop in self.layout.gaps:
            self.unsharded_grad[start:stop].zero_()  # padding takes part in the reduction and in the norm

    # ---- the sum over the ranks --------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Start summing the full gradients over the ranks into this rank's shard. Does not block.

        Parameters without a gradient count as zero, because every rank must issue the same collectives.
        """
        self._open(sums_locally=False)
        assert self.unsharded_grad is not None
        for index, flat in enumerate(self._flats):
            if index not in self._filled:
                flat.zero_()
        self._filled.clear()
        self._closed = True
        if not self.sums_over_ranks:
            assert self._keeps_full, "only full gradients can stay unsummed"
            self._reducing = Reduction(Pending(), self._own_slice(self.unsharded_grad))
            self.move(GradState.REDUCING)
            return
        full = self.unsharded_grad.to(self._reduce_dtype)  # the same tensor if the dtypes agree
        self.reduced_in = full.dtype
        if self._reduces_in_place:
            out = self._own_slice(full)
        else:
            out = self._empty(self.layout.shard_numel, self._reduce_dtype)
        if self.coded is not None:
            self._reducing = Reduction(*self.coded.start(full, out))
        else:
            self._reducing = Reduction(self._collectives.reduce(full, out, self.name), out)
        self.move(GradState.REDUCING)  # not before: if no reduction could be issued, none is under way

    def wait_reduce(self) -> None:
        """Block until grad_shard holds the sum over the ranks; frees the full gradient if the plan shards gradients."""
        if self._reducing is None:
            return
        pending, out, received = self._reducing
        pending.wait()
        if received is not None:
            self.coded.add(out, received)
        assert self.unsharded_grad is not None
        # Kept full gradients are reduced once a step. Sharded ones may be reduced in each backward, so they accumulate.
        if self._keeps_full:
            self.grad_shard = self._own_slice(self.unsharded_grad)
            if self.grad_dtype != self._reduce_dtype:  # else `out` is this slice itself
                self.grad_shard.copy_(out)
            if self.earlier is not None:
                self.grad_shard.add_(self.earlier)
                self.earlier = None
        else:
            self._keep(None)
            if self.grad_shard is None:
                self.grad_shard = out.to(self.grad_dtype)
            else:
                ops.accumulate_(self.grad_shard, out)
        self._reducing = None
        self.move(GradState.REDUCED)

    # ---- reduced gradients -------------------------------------------------------------------------------------------

    def squares(self) -> torch.Tensor | None:
        """The sum of squares of this rank's part of the gradient (0-dim fp64 on the device); None without a gradient.

        See [Note: each element once] in optim/grad_norm.py.
        """
        if self._squares is not None or self.grad_shard is None:
            return self._squares
        if not self.sums_over_ranks and self.unsharded_grad is not None:
            return ops.sum_of_squares(self.unsharded_grad)
        total: torch.Tensor | None = None
        for start, stop in self._counted:
            squares = ops.sum_of_squares(self.grad_shard[start:stop])
            total = squares if total is None else total + squares
        return torch.zeros((), dtype=torch.float64, device=self.grad_shard.device) if total is None else total

    def keep_squares(self) -> None:
        """Compute `squares` now, while the gradient is still on the device."""
        self._squares = self.squares()

    def forget_squares(self) -> None:
        """The gradient was changed: compute `squares` anew."""
        self._squares = None

    def give_away(self, elsewhere: torch.Tensor) -> None:
        """Replace grad_shard by `elsewhere` and release the previous shard and the full gradient."""
        self.grad_shard = elsewhere
        self._keep(None)

    def free(self) -> None:
        """Free the gradients of this step, reduced or not. Waits for a reduction under way."""
        self.wait_reduce()
        if self.state is not GradState.EMPTY:
            self.move(GradState.EMPTY)
        self._filled.clear()
        self._closed = False
        self._keep(None)
        self.grad_shard = self._squares = self.earlier = None

    @property
    def kept(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors beside the gradients of the latest backward: errors of quantising, and earlier gradients."""
        return None if self.coded is None else self.coded.errors, self.earlier

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def local(self, name: str) -> tuple[Segment, torch.Tensor] | None:
        """One parameter and a view of this rank's own gradient of it, if it is not reduced; None otherwise."""
        if self.state is not GradState.LOCAL or self.unsharded_grad is None:
            return None
        found = (self.layout.segments[index] for index in self._filled)
        return next(((one, one.of(self.unsharded_grad)) for one in found if one.name == name), None)

    def first_non_finite(self) -> str | None:
        """The first parameter, in the unit's order, whose unreduced local gradient is not finite; None if all are.

        Reads on the host.
        """
        if self.unsharded_grad is None:
            return None
        for index, segment in enumerate(self.layout.segments):
            if index in self._filled and not bool(torch.isfinite(segment.of(self.unsharded_grad)).all()):
                return segment.name
        return None

    def message_tensors(self) -> list[torch.Tensor]:
        """The results of a reduction under way."""
        if self._reducing is None:
            return []
        return [one for one in (self._reducing.out, self._reducing.received) if one is not None]

    def move(self, to: GradState) -> None:
        """Enter a state; UnitStateError if the current state does not lead there."""
        if to not in _NEXT[self.state]:
            raise UnitStateError(f"unit {self.name}: gradients cannot go from {self.state.value} to {to.value}")
        self.state = to

    def _keep(self, full: torch.Tensor | None) -> None:
        """Replace the full gradient and its views, which would keep its memory."""
        self.unsharded_grad = full
        self._flats = () if full is None else full.split_with_sizes(self._sizes)[::2]

    def _own_slice(self, full: torch.Tensor) -> torch.Tensor:
        return self.layout.shard_of(full, self._collectives.shard_rank)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)


def _sizes(layout: FlatLayout) -> list[int]:
    """The elements of each parameter and those between it and the next, in turn."""
    ends = [*(segment.offset for segment in layout.segments[1:]), layout.padded_numel]
    sizes = []
    for segment, end in zip(layout.segments, ends, strict=True):
        sizes += [segment.numel, end - segment.offset - segment.numel]
    return sizes
