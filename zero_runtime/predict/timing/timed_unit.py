"""A unit that advances the clock of a predicted step where a real one computes, copies or communicates.

When it does so is decided by CountedUnit and by the runtime's schedule. Standard library only.
"""

from __future__ import annotations

from zero_runtime.plan import Phase
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.counted_unit import Book, Copying, CountedUnit, CountRules
from zero_runtime.predict.timing.costs import CollectiveCost, StepCosts
from zero_runtime.predict.timing.step_clock import InFlight, StepClock
from zero_runtime.state_bytes import UnitSize

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
        self._gather_sent = self._reduce_sent = self._exchange_sent = self._grad_sent = NOTHING
        self._summed = False  # the full gradient has gradients of an earlier micro-batch
        self._exchanged = rules.plan.outer_sharding is None  # the parameters that the group holds are current

    def unshard(self) -> None:
        if self._current or self._in_gather:
            return
        super().unshard()
        self._exchange()
        nbytes = self._numel * self._param
        # The next unit's shard is fetched beside this unit's gather, so that the slower of the two decides.
        fetch_s = self._costs.fetch.at(self._shard * self._param) if self._is_fetched else 0.0
        if self._rules.group_ranks > 1 and not self._held:
            self._gather_sent = self._begin(self._costs.gather, nbytes, fetch_s)
            return
        self._gather_sent = self._clock.issue(fetch_s, 0)
        if self._casts or not self._plan.keeps_full_params:
            self._copy(2 * nbytes)

    @property
    def _is_fetched(self) -> bool:
        return self._size.params_offloaded and self._size.separate_memory

    def _end_gather(self) -> None:
        if self._in_gather:
            self._clock.wait(self._exchange_sent)
            self._clock.wait(self._gather_sent)
            if self._casts:
                self._copy(self._numel * (self._param + self._compute))
        super()._end_gather()

    def reshard(self, after: Phase) -> None:
        super().reshard(after)
        if self._plan.outer_sharding is not None and self.trainable and after is Phase.STEP:
            self._exchanged = False

    def renew(self) -> None:
        super().renew()
        self._exchange()

    def _exchange(self) -> None:
        """Gather the parameters of a group from the other groups, unless they are current."""
        if not self._exchanged:
            self._exchanged = True
            self._exchange_sent = self._across(self._numel * self._param / self._rules.group_ranks, halves=1)

    def _across(self, nbytes: float, *, halves: int) -> InFlight:
        """A collective between the shard groups. An all-reduce takes as long as a reduce-scatter and an all-gather,
        its halves, and between CPUs it is these two: see collectives.py."""
        cost = self._costs.replica
        self._clock.compute(cost.start.at(nbytes))
        meetings = halves if self._rules.by_messages else 1
        return self._clock.issue(cost.rest.at(nbytes) * halves / 2, meetings)

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
        rules, nbytes = self._rules, self._numel * self._reduce
        if rules.group_ranks > 1:
            self._reduce_sent = self._begin(self._costs.reduce, nbytes)
        if rules.group_count > 1:
            halves = 2 if self._plan.outer_sharding is None else 1
            self._reduce_sent = self._across(nbytes / rules.group_ranks, halves=halves)

    def _begin(self, collective: CollectiveCost, nbytes: float, least_s: float = 0.0) -> InFlight:
        """A collective in the shard group that takes at least so long."""
        self._clock.compute(collective.start.at(nbytes))
        return self._clock.issue(max(collective.rest.at(nbytes), least_s), 1)

    def wait_reduce(self) -> None:
        if self._reducing is None:
            return
        adds = self._grad_shard is not None
        self._clock.wait(self._reduce_sent)
        super().wait_reduce()
        if not self._plan.keeps_full_grads and (adds or self._grad != self._reduce):
            self._copy(self._shard * (self._reduce + (1 + adds) * self._grad))

    def send_grad(self) -> None:
        super().send_grad()
        if self.trainable and self._size.optimizer_offloaded and self._size.separate_memory:
            self._grad_sent = self._clock.issue(self._costs.send.at(self._shard * self._grad), 0)

    def update(self) -> None:
        super().update()
        self._clock.wait(self._grad_sent)
        if self.trainable and self._is_fetched and not self._size.optimizer_offloaded:
            self._clock.issue(self._costs.send.at(self._shard * self._param), 0)

    def _copy(self, nbytes: float) -> None:
        self._clock.compute(self._costs.copy.at(nbytes))
