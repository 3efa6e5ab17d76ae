"""What every tier offers to the runtime and the optimizer, and what it lends to an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_runtime.flat_layout import FlatLayout
from zero_runtime.unit import Unit

PARAM, MASTER = "param", "master"


@dataclass
class Shards:
    """What an update reads and writes of one unit, all of it in one memory: the tier's, and only while it is lent.

    param_shard is master_shard itself where the new parameters are taken from there.
    """

    layout: FlatLayout
    master_shard: torch.Tensor | None  # [S] master_dtype
    grad_shard: torch.Tensor | None  # [S] grad_dtype
    param_shard: torch.Tensor  # [S] param_dtype
    states: dict[str, torch.Tensor]

    @classmethod
    def of(cls, unit: Unit, states: dict[str, torch.Tensor]) -> Shards:
        """The unit's own."""
        return cls(unit.layout, unit.master_shard, unit.grad_shard, unit.param_shard, states)


Compute = Callable[[Unit, Shards], None]  # updates what is lent, in place, from any thread


class StateTier(Protocol):
    """Where the shards of one rank's units rest."""

    def holds(self, unit: Unit) -> bool:
        """Whether some of the unit's shards rest here."""
        ...

    def resident(self, unit: Unit, *, writes: bool, fresh: bool = False) -> AbstractContextManager[None]:
        """All shards of a unit are in memory inside. `writes`: they are written back at the end; `fresh`: nothing is
        read first, and states are zero."""
        ...

    def reader(self, unit: Unit, name: str) -> Callable[[int, int], torch.Tensor] | None:
        """How elements [start, stop) of one tensor (param, master or a state) are read that is not in memory now."""
        ...

    def begin_update(self, units: Sequence[Unit]) -> None:
        """`update` of these or `forget_update` will follow."""

    def forget_update(self) -> None:
        """No update follows."""

    def update(self, units: Sequence[Unit], compute: Compute) -> None:
        """Have each of these units computed, in order. May return before it is done: the unit's place knows."""

    def guess(self, units: Sequence[Unit], compute: Compute) -> None:
        """The last backward of a step begins: `compute` these units as their gradients come, on second copies of what
        is written, and leave what is current alone. `adopt` or `reject` will follow."""

    def adopt(self) -> list[Unit]:
        """The guess was right: the second copies become current. Returns the units of `guess` that still need an
        update, since their shards were written in between."""
        ...

    def reject(self) -> None:
        """The guess was wrong: everything is as it was."""

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Memory of the host that this tier holds, by component (params, grads, optimizer, staging), for counting."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""


@contextmanager
def residence(tier: StateTier | None, unit: Unit, *, writes: bool = False, fresh: bool = False) -> Iterator[None]:
    """StateTier.resident for a unit that may rest nowhere: then nothing is done."""
    if tier is None or not tier.holds(unit):
        yield
        return
    with tier.resident(unit, writes=writes, fresh=fresh):
        yield
