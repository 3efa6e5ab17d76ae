"""Where model states rest between uses, and for how many units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from zero_runtime.errors import PlanError
from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.tiers.scratch import ScratchSettings


class Tier(Enum):
    """Where a state rests: with the device, in the host's memory, or in a scratch file."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class OffloadPlan:
    """params: the shards of the parameters, for plans that shard them. optimizer: masters and the optimizer's states.

    ratio: the share of the trained elements whose unit rests elsewhere; the rest stays with the device.
    scratch: of tier NVME alone. On a CPU the host is the device, so HOST changes nothing there.
    """

    params: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    ratio: float = 1.0
    scratch: ScratchSettings | None = None

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise PlanError(f"offload.ratio: expected above 0 and at most 1, found {self.ratio}")
        if self.uses_nvme and self.scratch is None:
            raise PlanError("offload: expected a folder for the scratch file, found none; give OffloadPlan.scratch")
        if self.params is Tier.NVME and self.optimizer is not Tier.NVME:
            raise PlanError(
                "offload.params=nvme: expected offload.optimizer=nvme with it, which is several times as large"
            )

    @property
    def uses_nvme(self) -> bool:
        return Tier.NVME in (self.params, self.optimizer)

    def check(self, plan: ZeroPlan, device: str) -> None:
        """PlanError where `plan` keeps whole parameters, whose shards there is no use in moving away, and on any device
        (by its type) but a CPU, from which nothing is moved yet."""
        if device != "cpu" and (self.params, self.optimizer) != (Tier.DEVICE, Tier.DEVICE):
            raise PlanError(
                f"offload: expected a CPU, found {device}: moving states away from another device is not here yet; "
                "leave RuntimeSettings.offload out, or set offload=none"
            )
        if self.params is not Tier.DEVICE and plan.params is Partition.REPLICATED:
            raise PlanError(
                f"offload.params={self.params.value}: expected a plan that shards parameters, found one that keeps "
                "them whole on every rank; shard them too, or offload the optimizer alone"
            )


class Sized(Protocol):
    """A unit as far as choosing goes."""

    @property
    def trainable(self) -> bool: ...

    @property
    def numel(self) -> int: ...


def resting(units: Sequence[Sized], ratio: float) -> list[bool]:
    """Which units rest elsewhere: the first in order, as many as come nearest to `ratio` of the trained elements.

    Frozen units rest where all do.
    """
    total = sum(unit.numel for unit in units if unit.trainable)
    chosen, reached = [], 0
    for unit in units:
        rests = ratio == 1 or (unit.trainable and reached + unit.numel / 2 <= ratio * total)
        reached += unit.numel if rests and unit.trainable else 0
        chosen.append(rests)
    return chosen
