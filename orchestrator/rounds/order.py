"""Which steps belong to which round, and whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Name = TypeVar("Name", bound=Hashable)


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """The order of the items in this turn, from 0: each turn begins with the next item."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


def round_sizes(steps: int, rounds: int) -> list[int]:
    """The numbers of steps of the rounds; they differ by 1 at most. Fewer rounds if there are fewer steps."""
    rounds = min(rounds, steps)
    return [steps * (number + 1) // rounds - steps * number // rounds for number in range(rounds)]


class TurnOrder(Generic[Name]):
    """Whose turn it is. All have had turn t before one has turn t + 1; those that leave are passed over."""

    def __init__(self, names: Sequence[Name]) -> None:
        self._names = list(names)
        self._turns = dict.fromkeys(names, 0)

    @property
    def names(self) -> list[Name]:
        """Those that have not left."""
        return list(self._turns)

    def turns(self, name: Name) -> int:
        """How many turns it has had; 0 for one that left."""
        return self._turns.get(name, 0)

    def next(self) -> Name | None:
        """None if all have left."""
        if not self._turns:
            return None
        # A machine's speed changes within minutes. Points that are measured one after the other meet different
        # machines; points that take turns (A B C, then B C A) meet the same ones, and none is always the first after a
        # pause.
        least = min(self._turns.values())
        order = rotated(self._names, least)
        return next(name for name in order if self._turns.get(name) == least)

    def end_turn(self, name: Name) -> None:
        """Counts a turn; a no-op for one that left."""
        if name in self._turns:
            self._turns[name] += 1

    def leave(self, name: Name) -> None:
        """It gets no more turns. A no-op for one that left."""
        self._turns.pop(name, None)
