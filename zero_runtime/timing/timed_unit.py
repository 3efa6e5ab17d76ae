"""A unit that advances the clock of a predicted step where a real one computes, copies or communicates.

When it does so is decided by CountedUnit and by the runtime's schedule. Standard library only.
"""

from __future__ import annotations

from functools import partial

from zero_runtime.memory.counted_unit import Book, Copying, CountedUnit, CountRules
from zero_runtime.memory.model import UnitSize
from zero_runtime.precision import MixedPrecision
from zero_runtime.timing.costs import CollectiveCost, StepCosts
from zero_runtime.timing.step_clock import InFlight, StepClock

NOTHING = InFlight(0.0)


class TimedUnit(CountedUnit):
    """The times of one unit on one rank. See CountedUnit for the conditions under which a call does something."""

    def __init__(
        self,
        clock: StepClock,
        costs: StepCosts,
        size: UnitSize,
        precision: MixedPrecision,
        rules: CountRules,
        book: Book,
        copying: Copying,
    ) -> None:
        super().__init__(size, precision, rules, book, copying)
        self._clock, self._costs = clock, costs
        self._gather_sent = self._reduce_sent = NOTHING
        self._summed = False  # the full gradient has gradients of an earlier micro-batch

    def unshard(self) -> None:
        if self._current or self._in_gather:
            return
        super().unshard()
        nbytes = self._numel * self._param
        if self._rules.shard_count > 1:
            self._gather_sent = self._begin(self._costs.gather, nbytes)
        elif self._casts or not self._plan.keeps_full_params:
            self._copy(2 * nbytes)

    def _end_gather(self) -> None:
        if self._in_gather:
            self._clock.wait(self._gather_sent)
            if self._casts:
                self._copy(self._numel * (self._param + self._compute))
        super()._end_gather()

    def take_grad(self, *, sums_locally: bool) -> None:
        super().take_grad(sums_locally=sums_locally)
        assert self._whole_grad is not None
        # A copy reads the gradient and writes the flat one; a sum reads the flat one too.
        read = self._numel * self._compute + (self._whole_grad.nbytes if self._summed else 0)
        self._copy(read + self._whole_grad.nbytes)
        self._summed = True

    def reduce_grad(self) -> None:
        if not self.trainable:
            return
        super().reduce_grad()
        self._summed = False
        assert self._whole_grad is not None
        if self._whole_grad.nbytes != self._numel * self._reduce:
            self._copy(self._whole_grad.nbytes + self._numel * self._reduce)
        if self._rules.shard_count > 1:
            self._reduce_sent = self._begin(self._costs.reduce, self._numel * self._reduce)
        if self._rules.replica_count > 1:
            # Between CPUs an all-reduce is a reduce-scatter and an all-gather: see collectives.py.
            meetings = 2 if self._rules.by_messages else 1
            self._reduce_sent = self._begin(self._costs.replica, self._shard * self._reduce, meetings)

    def _begin(self, collective: CollectiveCost, nbytes: float, meetings: int = 1) -> InFlight:
        self._clock.compute(collective.start.at(nbytes))
        return self._clock.issue(collective.rest.at(nbytes), meetings)

    def wait_reduce(self) -> None:
        if self._reducing is None:
            return
        adds = self._grad_shard is not None
        self._clock.wait(self._reduce_sent)
        super().wait_reduce()
        if not self._plan.keeps_full_grads and (adds or self._grad != self._reduce):
            self._copy(self._shard * (self._reduce + (1 + adds) * self._grad))

    def _copy(self, nbytes: float) -> None:
        self._clock.compute(self._costs.copy.at(nbytes))


def timed_units(clock: StepClock, costs: StepCosts) -> partial[TimedUnit]:
    """What StepReplay makes its units with."""
    return partial(TimedUnit, clock, costs)
