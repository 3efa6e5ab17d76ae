"""Named faults that are injected into the runtime on purpose, to show that the test suite can fail.

Each imitates a plausible mistake. `apply(name)` patches the runtime of this process; ranks call it if a fault is set
(see `harness.ranks.set_fault`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from zero_runtime import collectives, flat_layout, runtime, schedule, unit
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.initial_values import InitialValues
from zero_runtime.kernels import ops
from zero_runtime.kernels.settings import AdamW
from zero_runtime.plan import Phase
from zero_runtime.unit_gradients import UnitGradients
from zero_runtime.unit_planner import UnitSpec

FAULTS: dict[str, Callable[[], None]] = {}


def fault(function: Callable[[], None]) -> Callable[[], None]:
    FAULTS[function.__name__] = function
    return function


def apply(name: str) -> None:
    FAULTS[name]()


@fault
def gradients_are_averaged_over_the_ranks() -> None:
    wait = UnitGradients.wait_reduce

    def averaging(self: UnitGradients) -> None:
        pending = self._reducing is not None
        wait(self)
        if pending and self.grad_shard is not None:
            self.grad_shard.div_(self._collectives.world)

    UnitGradients.wait_reduce = averaging  # type: ignore[method-assign]


@fault
def padding_is_not_zeroed() -> None:
    take = UnitGradients.take

    def dirty(self: UnitGradients, index: int, grad: torch.Tensor, *, sums_locally: bool) -> None:
        take(self, index, grad, sums_locally=sums_locally)
        assert self.unsharded_grad is not None
        self.unsharded_grad[self.layout.numel :].fill_(0.5)

    UnitGradients.take = dirty  # type: ignore[method-assign]


@fault
def a_weight_is_counted_twice_in_the_norm() -> None:
    squares = runtime.local_sum_of_squares

    def twice(units: list, *args: object) -> torch.Tensor:
        return squares([*units, units[-1]], *args)  # type: ignore[arg-type]

    runtime.local_sum_of_squares = twice  # type: ignore[assignment]


@fault
def the_norm_is_one_ranks_own() -> None:
    agree = collectives.Collectives.sum_over_ranks_

    def local(self: collectives.Collectives, control: torch.Tensor) -> torch.Tensor:
        own = control.clone()
        summed = agree(self, control)
        if control.numel() == 4:  # the loss, the squares, and two fingerprints of the collectives
            summed[1] = own[1]
        return summed

    collectives.Collectives.sum_over_ranks_ = local  # type: ignore[method-assign]


@fault
def the_last_units_reduction_is_skipped() -> None:
    start = collectives.Collectives.reduce
    calls = {"left": 0}

    def skipping(self: collectives.Collectives, full: torch.Tensor, shard: torch.Tensor) -> collectives.Pending:
        calls["left"] += 1
        if calls["left"] % 3 == 0 and self.world > 1:
            shard.copy_(full[self.shard_rank * shard.numel() :][: shard.numel()])
            return collectives.Pending()
        return start(self, full, shard)

    collectives.Collectives.reduce = skipping  # type: ignore[method-assign]


@fault
def a_stale_gather_is_used_again() -> None:
    def keep(self: schedule.Schedule) -> None:
        for one in self._units[1:]:
            one.reshard(Phase.STEP)

    schedule.Schedule.after_step = keep  # type: ignore[method-assign]


@fault
def an_overflow_is_stepped_over() -> None:
    class Trusting:
        @staticmethod
        def isfinite(_: float) -> bool:
            return True

    runtime.math = Trusting  # type: ignore[assignment]


@fault
def a_micro_batch_is_lost() -> None:
    take = UnitGradients.take

    def overwriting(self: UnitGradients, index: int, grad: torch.Tensor, *, sums_locally: bool) -> None:
        self._filled.discard(index)
        take(self, index, grad, sums_locally=sums_locally)

    UnitGradients.take = overwriting  # type: ignore[method-assign]


@fault
def clipping_does_nothing() -> None:
    clip = runtime.clip_coefficient
    runtime.clip_coefficient = lambda norm, _: clip(norm, None)  # type: ignore[assignment]


@fault
def the_mean_is_over_each_ranks_own_tokens() -> None:
    count = runtime.ZeroRuntime.sum_over_ranks

    def own(self: runtime.ZeroRuntime, tokens: int) -> torch.Tensor:
        return torch.full_like(count(self, tokens), max(tokens, 1) * self.collectives.world)

    runtime.ZeroRuntime.sum_over_ranks = own  # type: ignore[method-assign]


@fault
def the_master_is_taken_after_rounding() -> None:
    materialize = unit.Unit.materialize

    def rounded(self: unit.Unit, initial: InitialValues, given: Collection[str] = ()) -> None:
        materialize(self, initial, given)
        if self.master_shard is not None:
            self.master_shard.copy_(self.param_shard)

    unit.Unit.materialize = rounded  # type: ignore[method-assign]


@fault
def the_step_count_runs_once_a_unit() -> None:
    adamw = ops.adamw_
    calls = {"step": 0}

    def counting(*args: object) -> None:
        calls["step"] += 1
        *tensors, settings, param_out = args
        adamw(*tensors, AdamW(**{**vars(settings), "step": calls["step"]}), param_out)  # type: ignore[arg-type]

    ops.adamw_ = counting  # type: ignore[assignment]


@fault
def the_loss_scale_is_left_in_the_update() -> None:
    clip = runtime.clip_coefficient
    runtime.clip_coefficient = lambda norm, limit: clip(norm, limit) * 4096.0  # type: ignore[assignment]


@fault
def shards_are_cut_one_element_late() -> None:
    def late(self: flat_layout.FlatLayout, shard: int) -> tuple[int, int]:
        start = shard * self.shard_numel
        moved = min(start + (1 if shard == 0 and self.shard_count > 1 else 0), self.padded_numel - self.shard_numel)
        return moved, moved + self.shard_numel

    flat_layout.FlatLayout.shard_range = late  # type: ignore[method-assign]


@fault
def micro_batches_are_summed_in_sixteen_bits() -> None:
    begin = UnitGradients.__init__

    def narrow(self: UnitGradients, spec: UnitSpec, *args: object) -> None:
        begin(self, spec, *args)  # type: ignore[arg-type]
        self.grad_dtype = self._reduce_dtype = TORCH_DTYPE[spec.precision.param]

    UnitGradients.__init__ = narrow  # type: ignore[method-assign]


@fault
def the_full_gradient_is_never_freed() -> None:
    wait = UnitGradients.wait_reduce

    def keeping(self: UnitGradients) -> None:
        kept = self.unsharded_grad
        wait(self)
        self.__dict__.setdefault("kept", []).append(kept)

    UnitGradients.wait_reduce = keeping  # type: ignore[method-assign]


@fault
def parameters_are_gathered_once_too_often() -> None:
    after = schedule.Schedule.end_backward

    def regather(self: schedule.Schedule) -> None:
        after(self)
        for one in self._units:
            one.reshard(Phase.STEP)
            one.wait_unshard()

    schedule.Schedule.end_backward = regather  # type: ignore[method-assign]
