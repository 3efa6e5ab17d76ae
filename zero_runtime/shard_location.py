"""Which shards of a unit are offloaded, and the contract with the place where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_runtime.offload_plan import OffloadPlan, Sized, Tier, offloaded_units


@dataclass(frozen=True)
class OffloadedShards:
    """Which shards of a unit are offloaded: have no memory on the device between their uses.

    params: param_shard. optimizer: master_shard and the optimizer's states. separate_memory: the offloaded
    shards are stored in memory that the device cannot compute with. A master in the parameters' dtype is then a
    separate tensor if it is offloaded and the parameters are not.
    """

    params: bool = False
    optimizer: bool = False
    separate_memory: bool = False


def offloaded_shards(plan: OffloadPlan, units: Sequence[Sized], device: str) -> list[OffloadedShards]:
    """For each unit, which shards are offloaded: have no memory on a device of this type between their uses."""
    separate = plan.has_separate_memory(device)
    moves = {Tier.DEVICE: False, Tier.HOST: separate, Tier.NVME: True}
    if not moves[plan.params] and not moves[plan.optimizer]:
        return [OffloadedShards()] * len(units)
    offloaded = OffloadedShards(moves[plan.params], moves[plan.optimizer], separate)
    return [offloaded if chosen else OffloadedShards() for chosen in offloaded_units(units, plan.ratio)]


class ShardLocation:
    """The place where a unit's shards are stored; this class is that of a unit that is not offloaded.

    Repeating a call is a no-op.
    """

    def begin_fetch(self) -> None:
        """Start copying param_shard to the device. Does not block."""

    def fetch(self) -> torch.Tensor | None:
        """The current param_shard ([S] param_dtype) for a gather that is issued now; None for the unit's own tensor."""
        return None

    def drop(self) -> None:
        """Release the tensor that `fetch` returned: the gather has read it, or it is no longer needed."""

    def send_grad(self) -> None:
        """Called when grad_shard is complete for this step: start moving it to where the update runs."""

    def settle(self) -> None:
        """Block until no update or copy of the unit is under way, so that its shards may be read. To write them, enter
        the tier's `resident(writes=True)`."""

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """The unit's tensors in host memory that its tier owns, by component, for counting; see StateTier."""
        return {}


ON_DEVICE = ShardLocation()
