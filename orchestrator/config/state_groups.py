"""The groups that say what model states are: how they are sharded, in which dtypes, and where they rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.config.strict import Limits, Word


class DType(Word):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Compute(Word):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class OffloadDevice(Word):
    device = "device"
    cpu = "cpu"
    nvme = "nvme"


class StepTime(Word):
    after_backward = "after_backward"
    speculative = "speculative"


@dataclass(frozen=True)
class Zero:
    """`prefetch` counts the units gathered ahead of the one in use; it changes time, never bits.

    `shard_ranks`: shard over groups of so many ranks and replicate across them; null shards over all.
    `reduce_at_boundary`: keep gradients whole over the micro-batches and reduce them once, also in stages 2 and 3.
    `unit_numel`: the elements that are gathered and reduced together; null makes one unit of each block.
    """

    stage: int = 2
    prefetch: int = 1
    shard_ranks: int | None = None
    reduce_at_boundary: bool = False
    unit_numel: int | None = None

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "zero")
        limits.must("stage", lambda value: 0 <= value <= 3, "0, 1, 2 or 3", 2)
        limits.at_least(0, prefetch=1)
        limits.at_least(1, shard_ranks=None, unit_numel=None)
        limits.conclude()


@dataclass(frozen=True)
class Precision:
    """Dtypes: of parameters, of gradients on the wire, of their sum, of the master weights, and of the computation.

    `compute` auto is `param`, but fp32 on a CPU without matrix instructions for it. The rest is for fp16 alone:
    `loss_scale` null scales losses dynamically, by the keys after it; a number fixes the scale.
    Parameters whose names match a pattern of `keep_dtype` stay in the dtype that they are built with (fp32).
    """

    param: DType = DType.bf16
    reduce: DType = DType.fp32
    accumulate: DType = DType.fp32
    master: DType = DType.fp32
    compute: Compute = Compute.auto
    tf32: bool = False
    loss_scale: float | None = None
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    keep_dtype: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "precision")
        limits.must("loss_scale", lambda value: value > 0, "above 0, or null for a dynamic scale", None)
        limits.must("initial_scale_power", lambda value: 0 <= value <= 32, "from 0 to 32", 16)
        limits.at_least(1, loss_scale_window=1000, hysteresis=2)
        limits.must("min_loss_scale", lambda value: value > 0, "above 0", 1.0)
        limits.conclude()


@dataclass(frozen=True)
class Offload:
    """Where the shards of the parameters, and masters and optimizer states, rest between their uses.

    `ratio`: the share of the trained elements whose unit rests elsewhere. `step`: whether units are updated when the
    norm is known, or during backward, which is undone where the norm says so. The rest is for nvme alone: `folder` of
    the scratch files (null: in the output folder), the size of a request, how many are in flight, how many units are
    read ahead and written behind, and whether what comes back is compared with the checksum of what was written.
    """

    params: OffloadDevice = OffloadDevice.device
    optimizer: OffloadDevice = OffloadDevice.device
    ratio: float = 1.0
    step: StepTime = StepTime.after_backward
    folder: str | None = None
    block_mib: int = 4
    requests: int = 4
    ahead: int = 1
    verify: bool = True

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "offload")
        limits.must("ratio", lambda value: 0 < value <= 1, "above 0 and at most 1", 1.0)
        limits.must("folder", bool, "a folder, or null", None)
        limits.at_least(1, block_mib=4, requests=4)
        limits.at_least(0, ahead=1)
        limits.conclude()

    @property
    def uses_nvme(self) -> bool:
        return OffloadDevice.nvme in (self.params, self.optimizer)
