"""Decides which units are done at which event of a backward. Pure: units are opaque keys; standard library only.

A trained unit is done when the last of its own gradients has arrived. A frozen unit has none: it is done when no
backward of a call that read it is under way. Units that are not done by the end of the backward are done then.

[Note: done on every rank]
A parameter that the forward did not use gets no gradient. If only one rank leaves a parameter unused, its unit would be
done later there than on the other ranks. The other ranks would wait for the unit's reduction before they issue a gather
that the first rank waits for: a deadlock. So a trained unit is also done when the gradients of the inputs of all its
calls have arrived. The unit's own gradients have arrived by then: autograd runs the nodes that were recorded last
first, and the nodes of a call are newer than the nodes that produced its inputs. A term of the weights that was built
before the calls has older nodes: `awaits` tells that autograd still has a gradient for the unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(eq=False)
class ModuleCall(Generic[Key]):
    """One call of a module that bounds units, with the units that it reads: its own and the borrowed ones."""

    units: list[Key]
    in_graph: bool = False  # the call will have a backward: gradients are enabled and it is not a recomputation
    nodes_before: int = 0  # nodes of autograd that existed when the call began
    opened_in: int = 0  # number of the backward that has begun but not ended this call's own backward; 0: none
    has_leaves: bool = False  # the inputs whose gradients close the call are leaves, see [Note: done on every rank]


class BackwardTracker(Generic[Key]):
    """Counts calls and gradients, and names the units that are done.

    Forwards report `read`. Then come `begin_backward`, any number of `open`, `close` and `take`, and `end_backward`.

    trained: number of parameters of each trained unit; every other unit is frozen. companions: by frozen unit, the
    trained units with parameters inside the same modules. shared: units with a parameter that several modules use.
    awaits: whether the backward under way has gradients for a unit beside those that arrived, by index.
    """

    def __init__(
        self,
        trained: Mapping[Key, int],
        companions: Mapping[Key, Sequence[Key]],
        shared: Collection[Key] = (),
        awaits: Callable[[Key, Collection[int]], bool] = lambda _unit, _arrived: False,
    ) -> None:
        self._trained = dict(trained)
        self._companions = dict(companions)
        self._kept_for: dict[Key, list[Key]] = {unit: [] for unit in trained}  # the frozen units by companion
        for frozen, others in companions.items():
            for unit in others:
                self._kept_for[unit].append(frozen)
        self._shared = frozenset(shared)
        self._awaits = awaits
        self.backward = 0  # number of the latest backward; 0 after a forward has begun
        self._latest = 0  # the same, but kept by forwards
        self._is_own = False  # the latest backward was started by the runtime
        self._calls: Counter[Key] = Counter()  # forward calls since the last backward
        self._unclosed: Counter[Key] = Counter()  # those in the graph that still await gradients of their inputs
        self._open: Counter[Key] = Counter()  # calls that read the unit and whose own backward is under way
        self._arrived: dict[Key, set[int]] = {unit: set() for unit in trained}  # in the latest backward, by index
        self._complete: set[Key] = set()  # trained units whose missing gradients, if any, count as zero
        self._lent: set[Key] = set()

    # ---- forward -------------------------------------------------------------------------------------------------

    def read(self, unit: Key, call: ModuleCall[Key]) -> None:
        """A call reads the unit, in a forward. Recomputations during a backward are not forwards."""
        if self.backward:  # the first forward after a backward
            if self._is_own:
                self._calls.clear()
                self._unclosed.clear()
            self.backward = 0
        self._calls[unit] += 1
        self._unclosed[unit] += call.in_graph

    def lend(self, unit: Key) -> None:
        """Something that reports no gradients reads the unit, so a frozen unit is not done before `end_loans`."""
        self._lent.add(unit)

    def end_loans(self) -> None:
        """Nothing reads the lent units any more."""
        self._lent.clear()

    # ---- backward ------------------------------------------------------------------------------------------------

    def begin_backward(self, number: int) -> None:
        """Events of backward `number`, from 1, follow.

        A backward that the runtime did not start (autograd.grad) has the number of the one before. No gradients arrive
        in it, so the trained units stay done. The calls that it closes may be in the graph of the next one too, so they
        still await the gradients of their inputs.
        """
        self.backward = number
        self._open.clear()
        self._is_own = number != self._latest
        if self._is_own:
            self._latest = number
            self._complete.clear()
            for arrived in self._arrived.values():
                arrived.clear()

    def end_backward(self) -> None:
        """Gradients that have not arrived by now count as zero: every trained unit is done."""
        self._complete.update(self._trained)

    def open(self, call: ModuleCall[Key]) -> None:
        """The gradient of an output of the call has arrived: its backward begins. Repeating a call is a no-op."""
        if call.opened_in != self.backward:
            call.opened_in = self.backward
            self._open.update(call.units)

    def close(self, call: ModuleCall[Key]) -> list[Key]:
        """The gradients of all inputs of the call have arrived. Returns the units that are done, in order.

        A call whose backward has not begun in this backward does not count: another backward closes it.
        """
        if not call.opened_in or call.opened_in != self.backward:
            return []
        call.opened_in = 0
        counts = call.in_graph and not call.has_leaves and self._is_own
        for unit in call.units:
            self._open[unit] -= 1
            self._unclosed[unit] -= counts
        done: list[Key] = []
        for unit in call.units:  # see [Note: done on every rank]
            is_missing = counts and self._unclosed[unit] == 0 and unit in self._trained and unit not in self._complete
            if is_missing and not self._awaits(unit, self._arrived[unit]):
                done += self._finish(unit)
        return done + [unit for unit in call.units if unit not in done and self._frozen_is_done(unit)]

    def take(self, unit: Key, index: int, *, inner: bool) -> Sequence[Key]:
        """The gradient of parameter `index` of a trained unit has arrived. Returns the units that are done, in order.

        inner: it arrived in a backward inside the backward.
        """
        arrived = self._arrived[unit]
        arrived.add(index)
        if len(arrived) < self._trained[unit]:
            return ()
        self._complete.add(unit)
        # A backward inside the backward (reentrant checkpointing) delivers a gradient for each use of a parameter: with
        # several uses this one may not be the last. The unit is done when one arrives outside, or at the end.
        if inner and (unit in self._shared or self._calls[unit] > 1):
            return ()
        return self._finish(unit)

    def _finish(self, unit: Key) -> list[Key]:
        """A trained unit is done, and with it the frozen units that were kept only for its gradients."""
        self._complete.add(unit)
        return [unit, *(frozen for frozen in self._kept_for[unit] if self._frozen_is_done(frozen))]

    def _frozen_is_done(self, unit: Key) -> bool:
        # A call further up in the forward may read it again. Its companions must be done too, because their gradients
        # may read the frozen unit outside of the path of the calls (as in DoRA).
        return (
            unit not in self._trained
            and unit not in self._lent
            and self._open[unit] == 0
            and self._complete.issuperset(self._companions.get(unit, ()))
        )
