"""Where model states rest between uses, and for how many units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from zero_runtime.errors import PlanError
from zero_runtime.offload.copy_streams import Copies
from zero_runtime.offload.scratch_file import ScratchSettings
from zero_runtime.plan import Partition, ZeroPlan


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
    speculative: units are updated as their gradients come, as if nothing would be clipped and all were finite, and what
        was current is kept until the norm has told; then the step is as it would have been otherwise, to the last bit.
    copies: how shards move between a device and the host; None is what the device needs. With one of its own the host
        is apart on a CPU too: the same way with other means.
    """

    params: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    ratio: float = 1.0
    scratch: ScratchSettings | None = None
    speculative: bool = False
    copies: Callable[[torch.device], Copies] | None = None

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

    @property
    def uses_host(self) -> bool:
        return Tier.HOST in (self.params, self.optimizer)

    def is_apart(self, device: str) -> bool:
        """Whether what rests is the host's, to keep and to update, beside a device of this type with its own memory."""
        return (self.uses_host or self.uses_nvme) and (device == "cuda" or self.copies is not None)

    def check(self, plan: ZeroPlan, device: str) -> None:
        """PlanError where `plan` keeps whole parameters, whose shards there is no use in moving away, and on devices
        (by type) from which nothing is moved yet."""
        if device not in ("cpu", "cuda") and (self.uses_nvme or self.uses_host):
            raise PlanError(
                f"offload: expected a CPU or a CUDA device, found {device}, from which nothing is moved yet; use "
                "offload=none"
            )
        rests = self.optimizer is Tier.NVME or (self.optimizer is Tier.HOST and self.is_apart(device))
        if self.speculative and not rests:
            raise PlanError(
                f"offload.step=speculative: expected masters and states that rest away from {device}, found them with "
                "it; use optimizer_nvme, or optimizer_cpu on a GPU, or offload.step=after_backward"
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
