"""Plan of an offload: where model states are stored between uses, for how many units, and in which scratch file.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from zero_runtime.errors import PlanError
from zero_runtime.limits import Limits
from zero_runtime.plan import Partition, ZeroPlan

ALIGN_BYTES = 4096  # direct I/O accepts multiples of this as offsets, sizes and addresses on every common file system


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of ALIGN_BYTES."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class Tier(Enum):
    """Where a state is stored: on the device, in host memory, or in a scratch file."""

    DEVICE = "device"
    HOST = "cpu"
    NVME = "nvme"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ScratchSettings:
    """Settings of the scratch file.

    folder: an existing folder on the disk to use. block_bytes: size of one request, a multiple of ALIGN_BYTES.
    requests: number of reads, and of writes, in flight together. ahead: number of units that are read ahead of the one
    being updated, and that are written behind it. verify: compare what is read back with the checksum of what was
    written.
    """

    folder: Path
    block_bytes: int = 4 << 20
    requests: int = 4
    ahead: int = 1
    verify: bool = True

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "offload", optional=())
        rule = f"a multiple of {ALIGN_BYTES:,} and above 0, which direct I/O needs"
        above = max(aligned(self.block_bytes), ALIGN_BYTES)
        limits.must("block_bytes", lambda size: size > 0 and size % ALIGN_BYTES == 0, rule, above)
        limits.at_least(1, requests=4)
        limits.at_least(0, ahead=1)
        limits.conclude()


@dataclass(frozen=True)
class OffloadPlan:
    """Which model states are offloaded, and to which tier.

    params: tier of the parameter shards, for plans that shard parameters. optimizer: tier of masters and optimizer
        states. On a CPU the host is the device, so HOST changes nothing there.
    ratio: share of the trained elements whose units are offloaded; the other units stay on the device.
    scratch: settings of the scratch file, for tier NVME only.
    copies: creates the copies between a device and the host (`Copies` in offload/copy_streams.py); None chooses by
        device. If given, the host counts as separate memory on a CPU too: the same code path with other copies.
    """

    params: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    ratio: float = 1.0
    scratch: ScratchSettings | None = None
    copies: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "offload")
        limits.must("ratio", lambda value: 0 < value <= 1, "above 0 and at most 1", 1.0)
        if self.params is Tier.NVME and self.optimizer is not Tier.NVME:
            rule = "offload.params=nvme needs offload.optimizer=nvme, which is several times as large"
            limits.refuse(rule, self.optimizer, "offload.optimizer=nvme", "offload.params=device")
        limits.conclude()
        if self.uses_nvme and self.scratch is None:
            raise PlanError("offload: expected a folder for the scratch file, found none; give OffloadPlan.scratch")

    @property
    def uses_nvme(self) -> bool:
        return Tier.NVME in (self.params, self.optimizer)

    @property
    def uses_host(self) -> bool:
        return Tier.HOST in (self.params, self.optimizer)

    def has_separate_memory(self, device: str) -> bool:
        """Whether the host stores and updates offloaded states, separate from the memory of a device of this type."""
        return (self.uses_host or self.uses_nvme) and (device == "cuda" or self.copies is not None)

    def check(self, plan: ZeroPlan, device: str) -> None:
        """PlanError if parameters are to be offloaded and `plan` keeps full ones (moving their shards would save
        nothing) or those of a group, or if offload does not support the device type."""
        if device not in ("cpu", "cuda") and (self.uses_nvme or self.uses_host):
            raise PlanError(
                f"offload: expected a CPU or a CUDA device, found {device}, from which nothing is moved yet; use "
                "offload=none"
            )
        if self.params is not Tier.DEVICE and plan.params is Partition.REPLICATED:
            raise PlanError(
                f"offload.params={self.params}: expected a plan that shards parameters, found one that keeps "
                "them in full on every rank; shard them too, or offload the optimizer alone"
            )
        if self.params is not Tier.DEVICE and plan.outer_sharding is not None:
            raise PlanError(
                f"offload.params={self.params}: expected a plan without outer sharding, found "
                f"zero.outer_sharding={plan.outer_sharding}, with which parameters stay on the device for their group; "
                "offload the optimizer alone, or set zero.outer_sharding=null"
            )


@dataclass(frozen=True)
class OffloadBytes:
    """Bytes of one rank. params, grads, optimizer: states stored in host memory. staging: other host buffers, for
    transfers. scratch: size of the scratch file; 0 without one."""

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    staging: int = 0
    scratch: int = 0

    @property
    def host(self) -> int:
        """Host memory in total, without the scratch file."""
        return self.params + self.grads + self.optimizer + self.staging


class Sized(Protocol):
    """The properties of a unit that `offloaded_units` needs."""

    @property
    def trainable(self) -> bool: ...

    @property
    def numel(self) -> int: ...


def offloaded_units(units: Sequence[Sized], ratio: float) -> list[bool]:
    """Which units are offloaded: taken in order, so that they come nearest to `ratio` of the trained elements.

    Frozen units are offloaded only if all units are (ratio 1).
    """
    total = sum(unit.numel for unit in units if unit.trainable)
    chosen, reached = [], 0
    for unit in units:
        moves = ratio == 1 or (unit.trainable and reached + unit.numel / 2 <= ratio * total)
        reached += unit.numel if moves and unit.trainable else 0
        chosen.append(moves)
    return chosen
