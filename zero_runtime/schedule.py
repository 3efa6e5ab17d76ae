"""When things move: the order of the units, what is gathered ahead, when a gradient is reduced.

Prefetching is calling a unit's `unshard` earlier, and overlapping a reduction is waiting for it later, so neither
changes any bits. The order of the units is recorded in the first forward and the first backward.

[Note: one order of reductions]
Units need not complete in one order on all ranks: one that uses only part of a unit completes it later than its peers
do. Ranks that issued reductions as units complete would then pair different units, silently where their sizes agree.
So every rank issues them in one order, the reverse of registration, each when it and all before it are complete; and
over a process group of their own, because they fall between different gathers on different ranks.
"""

from __future__ import annotations

from zero_runtime.plan import Phase, ZeroPlan
from zero_runtime.unit import Unit


class Schedule:
    """Turns the events of a step (from `ModuleHooks` and the runtime) into the units' verbs."""

    def __init__(self, units: list[Unit], plan: ZeroPlan, *, prefetch: int) -> None:
        self._units = units
        self._plan = plan
        self._prefetch = prefetch
        self._order: dict[Phase, list[Unit]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        self._recorded: set[Phase] = set()
        self._phase = Phase.FORWARD
        self._reducing: Unit | None = None
        # See [Note: one order of reductions].
        self._reduction_order = [unit for unit in reversed(units) if unit.trainable]
        self._complete: set[Unit] = set()
        self._reduced = 0
        self._reduces = True
        self._boundary = False
        self.backwards = 0  # how many have begun

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way; a forward seen then is a recomputation."""
        return self._phase is Phase.BACKWARD

    @property
    def sums_locally(self) -> bool:
        """Whether the backward under way leaves its gradients on this rank, for a later one to add to and reduce."""
        return not self._reduces

    # ---- forward -----------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        """The unit's parameters are about to be read."""
        self._gather(unit)

    def after_forward(self, unit: Unit) -> None:
        """The unit's parameters have been read. A forward seen during backward is a recomputation: keep them."""
        if self._phase is Phase.FORWARD:
            unit.reshard(Phase.FORWARD)

    # ---- backward ----------------------------------------------------------------------------------------------

    def begin_backward(self, *, boundary: bool, synced: bool = True) -> None:
        """Backward starts. `boundary`: it is the step's last. Not `synced`: reduce nothing, whatever the plan says."""
        if self._order[Phase.FORWARD]:
            self._recorded.add(Phase.FORWARD)
        self._phase = Phase.BACKWARD
        self.backwards += 1
        self._boundary = boundary
        self._reduces = synced and (boundary or self._plan.reduces_every_backward)
        self._complete.clear()
        self._reduced = 0
        for unit in self._units:
            unit.begin_backward()

    def before_backward(self, unit: Unit) -> None:
        """The unit's parameters are about to be read again, to make gradients."""
        # An output that passed through several units reports once for each. (Outside of a backward of the runtime's, as
        # in autograd.grad, what the last one completed says nothing.)
        if unit not in self._complete or not self.in_backward:
            self._gather(unit)

    def after_backward(self, unit: Unit) -> None:
        """The unit's gradients have come, or a frozen unit's calls are over for now; release it and reduce."""
        unit.reshard(Phase.BACKWARD)
        if not unit.trainable:  # nothing to reduce, and a call before this one may read it again
            return
        self._complete.add(unit)
        self._reduce_in_order()

    def end_backward(self) -> None:
        """Backward is over: reduce what has not been (unused parameters count as zero), release everything."""
        self._complete.update(self._reduction_order)
        self._reduce_in_order()
        self._wait_reduce()
        for unit in self._units:
            unit.reshard(Phase.BACKWARD)
        self._recorded.add(Phase.BACKWARD)
        self._phase = Phase.FORWARD

    def after_step(self) -> None:
        """The shards are new: every full copy is stale."""
        for unit in self._units:
            unit.reshard(Phase.STEP)

    # ---- moves -------------------------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        unit.unshard()
        following = self._following(unit, 1 + self._prefetch)
        for ahead in following[: self._prefetch]:
            ahead.unshard()
        for beyond in following[self._prefetch :]:
            beyond.begin_fetch()  # what rests elsewhere sets out before it is gathered
        unit.wait_unshard()

    def _following(self, unit: Unit, count: int) -> list[Unit]:
        """The next `count` units in the recorded order of this phase; records it the first time round."""
        order = self._order[self._phase]
        if self._phase not in self._recorded:
            if unit not in order:
                order.append(unit)
            return []
        if unit not in order:
            return []
        place = order.index(unit)
        return order[place + 1 : place + 1 + count]

    def _reduce_in_order(self) -> None:
        """Start the reductions whose turn has come."""
        while self._reduced < len(self._reduction_order):
            unit = self._reduction_order[self._reduced]
            if unit not in self._complete:
                return
            self._reduced += 1
            if not self._reduces:
                continue
            # One reduction may be under way while the next unit's backward runs; a second full gradient, not a third.
            self._wait_reduce()
            unit.reduce_grad()
            self._reducing = unit

    def _wait_reduce(self) -> None:
        if self._reducing is not None:
            self._reducing.wait_reduce()
            if self._boundary:
                self._reducing.send_grad()
            self._reducing = None
