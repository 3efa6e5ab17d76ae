"""Interface of the tiers to the runtime and the optimizer, and the shards that a tier lends to an update."""

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
    """The tensors of one unit that an update reads and writes, all on one device. They belong to the tier, which lends
    them for the update only.

    param_shard is master_shard itself if the new parameters are taken from there.
    """

    layout: FlatLayout
    master_shard: torch.Tensor | None  # [S] master_dtype
    grad_shard: torch.Tensor | None  # [S] grad_dtype
    param_shard: torch.Tensor  # [S] param_dtype
    states: dict[str, torch.Tensor]

    @classmethod
    def of(cls, unit: Unit, states: dict[str, torch.Tensor]) -> Shards:
        """The shards that the unit itself holds."""
        return cls(unit.layout, unit.master_shard, unit.grad_shard, unit.param_shard, states)


Compute = Callable[[Unit, Shards], None]  # updates the lent shards in place, from any thread


class StateTier(Protocol):
    """Storage of the offloaded shards of one rank's units."""

    def holds(self, unit: Unit) -> bool:
        """Whether some of the unit's shards are offloaded to this tier."""
        ...

    def resident(self, unit: Unit, *, writes: bool, fresh: bool = False) -> AbstractContextManager[None]:
        """Context in which all shards of a unit are in memory. `writes`: they are written back at the end; `fresh`:
        nothing is read first, and states are zero."""
        ...

    def reader(self, unit: Unit, name: str) -> Callable[[int, int], torch.Tensor] | None:
        """Function that reads elements [start, stop) of a tensor (param, master or state); None if it is in memory."""
        ...

    def begin_update(self, units: Sequence[Unit]) -> None:
        """Announce that `update` of these units or `forget_update` will follow."""

    def forget_update(self) -> None:
        """The update that was announced will not follow."""

    def update(self, units: Sequence[Unit], compute: Compute) -> None:
        """`compute` each of these units, in order. May return before that is done; each unit's location tracks it."""

    def guess(self, units: Sequence[Unit], compute: Compute) -> None:
        """Called when the last backward of a step begins: `compute` these units as their gradients arrive, write to
        second copies and leave the current values unchanged. `adopt` or `reject` will follow."""

    def adopt(self) -> list[Unit]:
        """The guess was right: make the second copies current. Returns the units of `guess` that still need an update,
        since their shards were written in between."""
        ...

    def reject(self) -> None:
        """The guess was wrong: discard the second copies."""

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch file in bytes; 0 without one."""
        ...

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Host tensors that this tier holds, by component (params, grads, optimizer, staging), for counting."""
        ...

    def close(self) -> None:
        """Release all memory and files. Idempotent."""


@contextmanager
def residence(tier: StateTier | None, unit: Unit, *, writes: bool = False, fresh: bool = False) -> Iterator[None]:
    """StateTier.resident for a unit that may not be offloaded; then it does nothing."""
    if tier is None or not tier.holds(unit):
        yield
        return
    with tier.resident(unit, writes=writes, fresh=fresh):
        yield
