"""Decides when units are gathered, prefetched, released and reduced during a step.

Prefetching means calling a unit's `unshard` earlier, and overlapping a reduction means waiting for it later, so neither
changes any bits of the result. The order of the units is recorded in the first forward and the first backward.

Every rank issues the reductions in one order, that in which rank 0 used the units, reversed. They run over a process
group of their own, because they may fall between different gathers on different ranks. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from zero_runtime.plan import Phase, ZeroPlan


class ScheduledUnit(Protocol):
    """What the schedule calls: a `Unit`, or a `CountedUnit` (predict/memory), which only counts the bytes."""

    @property
    def trainable(self) -> bool: ...
    def begin_fetch(self) -> None: ...
    def unshard(self) -> None: ...
    def wait_unshard(self) -> None: ...
    def reshard(self, after: Phase) -> None: ...
    @property
    def waits_late(self) -> bool: ...
    def begin_backward(self) -> None: ...
    def reduce_grad(self) -> None: ...
    def wait_reduce(self) -> None: ...
    def send_grad(self) -> None: ...


class UnevenCalls(Protocol):
    """Gathers of ranks whose calls without gradients differ. running: a context of such calls, which all ranks enter;
    compare: called after other calls. See [Note: gather turns] in generation/."""

    def running(self) -> AbstractContextManager[None]: ...
    def compare(self) -> None: ...


class Ahead(NamedTuple):
    """What is begun when a unit is gathered: the gathers of the next units, and the copies to the device of the
    offloaded shards of the unit after them, one unit before its gather."""

    gathered: list[ScheduledUnit]
    fetched: list[ScheduledUnit]


NONE_AHEAD = Ahead([], [])


class Schedule:
    """Turns the events of a step (from `ModuleHooks` and the runtime) into calls of the units' methods."""

    def __init__(
        self, units: Sequence[ScheduledUnit], plan: ZeroPlan, *, prefetch: int, has_backward: bool = True
    ) -> None:
        """`has_backward`: if False, the order of the forward is known at the end of the first one."""
        self._units = units
        self._plan = plan
        self._prefetch = prefetch
        self._has_backward = has_backward
        self._gather_one: Callable[[ScheduledUnit], None] | None = None  # see `gather_by`
        self._order: dict[Phase, list[ScheduledUnit]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        self._ahead: dict[Phase, dict[ScheduledUnit, Ahead]] = {}  # by phase, once its order is recorded
        self._in_use: set[ScheduledUnit] = set()  # gathered by a use of their own, and not released since
        self._under_way: list[ScheduledUnit] = []
        self.in_backward = False  # a forward during a backward is a recomputation
        self.sums_locally = False  # this backward leaves its gradients unreduced, for a later one to add to and reduce
        # Until `set_reduction_order` replaces it, before the first backward.
        self._reduction_order = [unit for unit in reversed(units) if unit.trainable]
        self._has_agreed = False
        self.reduced_last: Collection[ScheduledUnit] = ()  # those of optional modules, see skipped_modules.py
        self._complete: set[ScheduledUnit] = set()
        self._reduced = 0
        self._boundary = False
        self.backwards = 0  # number of backwards begun so far

    # ---- forward -----------------------------------------------------------------------------------------------

    def before_unit_forward(self, unit: ScheduledUnit) -> None:
        """Called before a module call reads the unit's parameters: gather them."""
        self._gather(unit)

    @property
    def releases_in_forward(self) -> bool:
        """Whether a unit that the forward has read must be gathered again for the backward."""
        return self._plan.releases_params_after(Phase.FORWARD)

    def after_unit_forward(self, unit: ScheduledUnit) -> None:
        """Called when the unit's parameters have been read: release them, except in a recomputation during backward."""
        if not self.in_backward:  # after a recomputation the backward of the same block reads the unit next
            self._in_use.discard(unit)
            unit.reshard(Phase.FORWARD)

    def end_forward(self) -> None:
        """Called when a forward of the full model has ended."""
        if not self._has_backward and self._gather_one is None and self._order[Phase.FORWARD]:
            self._end_record(Phase.FORWARD)

    def gather_by(self, gather: Callable[[ScheduledUnit], None] | None) -> None:
        """Gather every unit by this function from now on, and none ahead; None restores the schedule's own way."""
        self._gather_one = gather

    # ---- backward ----------------------------------------------------------------------------------------------

    @property
    def own_reduction_order(self) -> list[int] | None:
        """The positions of the trained units in the reverse of the order in which this rank's forwards first used them,
        the others last; None after `set_reduction_order`."""
        if self._has_agreed:
            return None
        # Units complete in about this order. The reverse of registration would make the others wait for a unit that is
        # registered last and used first, such as the embedding of some models: no reduction would overlap with the
        # backward, and all full gradients would exist at its end.
        used = [unit for unit in reversed(self._order[Phase.FORWARD]) if unit.trainable]
        order = dict.fromkeys((*used, *self._reduction_order))
        # Optional modules last: a rank that uses one has its gradients at another time than a rank that knows only at
        # the end that there are none.
        return [self._units.index(unit) for unit in sorted(order, key=lambda unit: unit in self.reduced_last)]

    def set_reduction_order(self, order: list[int]) -> None:
        """Reduce the units in this order of their positions, which is the same on all ranks, from now on."""
        assert sorted(order) == sorted(map(self._units.index, self._reduction_order)), "the ranks have different units"
        self._reduction_order = [self._units[place] for place in order]
        self._has_agreed = True

    def begin_backward(self, *, boundary: bool, synced: bool = True) -> None:
        """Called when a backward starts.

        boundary: it is the last of the step. synced: if False, no gradients are reduced, whatever the plan says.
        """
        if self._order[Phase.FORWARD]:
            self._end_record(Phase.FORWARD)
        self.in_backward = True
        self.backwards += 1
        self._boundary = boundary
        self.sums_locally = not (synced and (boundary or self._plan.reduces_every_backward))
        self._complete.clear()
        self._in_use.clear()
        self._reduced = 0
        for unit in self._units:
            unit.begin_backward()

    def before_unit_backward(self, unit: ScheduledUnit) -> None:
        """Called before the unit's parameters are read to compute gradients: gather them."""
        # An output that passed through several units reports to each of them, so the unit may be complete already.
        # (In a backward that the runtime did not start, such as autograd.grad, `_complete` is left over from the last.)
        if unit not in self._complete or not self.in_backward:
            self._gather(unit)

    def after_unit_backward(self, unit: ScheduledUnit) -> None:
        """Called when the unit's gradients have arrived, or no call reads a frozen unit for now: release and reduce."""
        self._in_use.discard(unit)
        unit.reshard(Phase.BACKWARD)
        if not unit.trainable:  # nothing to reduce, and an earlier call of the forward may read the unit again
            return
        self._complete.add(unit)
        self._reduce_in_order()

    def end_backward(self) -> None:
        """Called when a backward has ended: issue the remaining reductions and release every unit.

        Parameters without a gradient count as zero.
        """
        self._complete.update(self._reduction_order)
        self._reduce_in_order()
        self._wait_reduce()
        self._in_use.clear()
        for unit in self._units:
            unit.reshard(Phase.BACKWARD)
        self._end_record(Phase.BACKWARD)
        self.in_backward = False

    def abandon_backward(self) -> None:
        """Called when a backward has ended with an error: release every unit, and issue no more reductions."""
        self._under_way.clear()  # `free_grads` waits for them
        self._in_use.clear()
        for unit in self._units:
            unit.reshard(Phase.BACKWARD)
        self.in_backward = False

    def after_step(self) -> None:
        """Called when the shards have been updated: declare every full copy stale."""
        for unit in self._units:
            unit.reshard(Phase.STEP)

    def reads_in_backward(self, unit: ScheduledUnit) -> bool:
        """Whether the first backward read the unit's parameters. It reads frozen ones to pass gradients on."""
        return unit in self._order[Phase.BACKWARD]

    # ---- gathers and reductions --------------------------------------------------------------------------------

    def _gather(self, unit: ScheduledUnit) -> None:
        if self._gather_one is not None:
            self._gather_one(unit)
            return
        unit.unshard()
        # Once for each time that the unit is gathered: a unit of several modules is read again when the units that
        # follow it may have been used and released, and a second gather of them would be for nothing.
        if unit not in self._in_use:
            self._in_use.add(unit)
            gathered, fetched = self._following(unit)
            for one in gathered:
                one.unshard()
            for one in fetched:
                one.begin_fetch()
        unit.wait_unshard()

    def _following(self, unit: ScheduledUnit) -> Ahead:
        """The next units in the order of this phase; none the first time, when the order is recorded."""
        phase = Phase.BACKWARD if self.in_backward else Phase.FORWARD
        if phase in self._ahead:
            return self._ahead[phase].get(unit, NONE_AHEAD)
        if unit not in self._order[phase]:
            self._order[phase].append(unit)
        return NONE_AHEAD

    def _end_record(self, phase: Phase) -> None:
        """The order of the phase is known from now on; a no-op after the first time."""
        if phase in self._ahead:
            return
        order = self._order[phase]
        # Shards that are copied to the device come one unit earlier than the gather that sends them.
        gathers = [order[place : place + self._prefetch] for place in range(1, len(order) + 1)]
        fetches = [order[place : place + 1] for place in range(1 + self._prefetch, len(order) + 1 + self._prefetch)]
        self._ahead[phase] = {unit: Ahead(*ahead) for unit, *ahead in zip(order, gathers, fetches, strict=True)}

    def _reduce_in_order(self) -> None:
        """Start the reductions whose turn has come: those of complete units with only such units before them."""
        # Not as soon as a unit completes: a rank that uses only part of a unit completes it later than the others, and
        # ranks would reduce different units with each other, without an error if the sizes are equal. The order itself
        # changes no bits, since a reduction involves one unit only.
        while self._reduced < len(self._reduction_order):
            unit = self._reduction_order[self._reduced]
            if unit not in self._complete:
                return
            self._reduced += 1
            if self.sums_locally:
                continue
            # At most one reduction that holds memory overlaps with the next unit's backward, so at most two full
            # gradients exist. The others are waited for at the end, when the other ranks have most likely come to them.
            if not unit.waits_late:
                self._wait_reduce()
            unit.reduce_grad()
            self._under_way.append(unit)

    def _wait_reduce(self) -> None:
        for unit in self._under_way:
            unit.wait_reduce()
            if self._boundary:  # before the last backward of a step more would be added to the shard
                unit.send_grad()
        self._under_way.clear()
