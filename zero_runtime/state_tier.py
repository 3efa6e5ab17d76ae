"""Contract between the tiers and the runtime and the optimizer, and the shards that a tier lends to an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zero_runtime.flat_layout import FlatLayout
from zero_runtime.shard_location import ShardLocation
from zero_runtime.unit import Unit

PARAM, MASTER = "param", "master"


class Stored(NamedTuple):
    """Size and dtype of a tensor that may be in a file."""

    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        return cls(tensor.numel(), tensor.dtype)


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


StatesOf = Callable[[Unit], dict[str, torch.Tensor]]  # the optimizer's states of a unit, by name


# Updates the shards that a tier lends for a unit, in place; may be called from any thread.
Update = Callable[[Unit, Shards], None]


class StateTier:
    """Storage of the offloaded shards of one rank's units; this class is that of a rank that offloads nothing.

    What a unit itself asks for is in ShardLocation.
    """

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch file in bytes; 0 without one."""
        return 0

    def resident(self, unit: Unit, *, writes: bool, fresh: bool = False) -> AbstractContextManager[None]:
        """Context in which all shards of an offloaded unit are in memory. `writes`: they are written back at the end;
        `fresh`: nothing is read first, and states are zero."""
        return nullcontext()

    def reader(self, unit: Unit, state: str) -> Callable[[int, int], torch.Tensor] | None:
        """Function that reads elements [start, stop) of a unit's weights (MASTER) or of one of its states by name; None
        if they are in memory."""
        return None

    def expect(self, units: Sequence[Unit]) -> None:
        """Announce that an update of these units or `forget` will follow. Called when the gradients are complete."""

    def forget(self) -> None:
        """The update that was announced will not follow."""

    def update(self, units: Sequence[Unit], update: Update) -> None:
        """Update these units in order. May return before that is done; each unit's location tracks it."""

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Host tensors that this tier holds, by component (params, grads, optimizer, staging), for counting."""
        return {}

    def stored(self, unit: Unit) -> dict[str, Stored]:
        """The unit's tensors that this tier stores and the unit does not hold, by name (PARAM, MASTER, a state)."""
        return {}

    def close(self) -> None:
        """Release all memory and files. Idempotent."""


NOTHING_OFFLOADED = StateTier()


def is_offloaded(unit: Unit) -> bool:
    """Whether some of the unit's shards are offloaded."""
    return unit.parameters.params_offloaded or unit.parameters.states_offloaded


def residence(
    tier: StateTier, unit: Unit, *, writes: bool = False, fresh: bool = False
) -> AbstractContextManager[None]:
    """StateTier.resident for a unit that may not be offloaded; then it does nothing."""
    return tier.resident(unit, writes=writes, fresh=fresh) if is_offloaded(unit) else nullcontext()


def tensors_of(locations: Iterable[ShardLocation]) -> dict[str, list[torch.Tensor]]:
    """The host tensors of all these locations, by component."""
    total: dict[str, list[torch.Tensor]] = {"params": [], "grads": [], "optimizer": [], "staging": []}
    for location in locations:
        for component, tensors in location.tensors().items():
            total[component] += tensors
    return total
