"""The groups that describe model states: how they are sharded, in which dtypes, and where they are stored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from orchestrator.config.parts import part
from orchestrator.config.strict import Limits
from zero_runtime.limits import broken_by
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings, Tier
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.plan import OuterSharding, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.wire import EXACT, Wire

Compute = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Zero:
    """How model states are sharded.

    `stage`: 0 to 3, what is sharded: nothing, optimizer states, also gradients, also parameters.

    `prefetch`: number of units that are gathered ahead of the one in use; it affects the time of a step, never the bits
    of its result. `shard_ranks`: shard over groups of this many ranks and replicate across the groups; null shards over
    all ranks (with tensor parallelism, over those that hold the same slice). `outer_sharding`: with groups in stage 3,
    shard gradients, masters and optimizer states over all ranks, while each group holds the parameters. optim exchanges
    new parameters between the groups once a step; null replicates across the groups.
    `reduce_at_boundary`: in stages 2 and 3 too, keep full gradients over the micro-batches and reduce them once.
    `unit_numel`: the most elements of a unit, which is gathered and reduced together; only a unit that cannot be split
    is larger. null makes one unit of each block.

    Lossy, and less on the wire: `gather_dtype`: int8 gathers parameters as 8-bit codes with a scale for each 256
    elements; null gathers them in precision.param. `reduce_dtype`: int8 or int4 sends gradients as such codes and sums
    them in fp32; null is precision.reduce. `error_feedback`: add what quantising took from a gradient to the next one,
    for 4 bytes an element on every rank.
    """

    stage: int = 2
    prefetch: int = 1
    shard_ranks: int | None = None
    outer_sharding: OuterSharding | None = None
    reduce_at_boundary: bool = False
    unit_numel: int | None = None
    wire: Wire = field(default=EXACT, metadata=part())

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "zero")
        limits.broken += broken_by(lambda: ZeroPlan.from_stage(self.stage))
        limits.broken += broken_by(lambda: self.plan) if not limits.broken else []
        if not limits.broken:
            broken = broken_by(lambda: self.wire.check_plan(self.plan))
            also = ("zero.stage=1",) if self.stage == 0 else ()
            limits.broken += [one._replace(fix=(*one.fix, *also)) for one in broken]
        limits.at_least(0, prefetch=1)
        limits.at_least(1, unit_numel=None)
        limits.conclude()

    @property
    def plan(self) -> ZeroPlan:
        return ZeroPlan.from_stage(self.stage, shard_ranks=self.shard_ranks, outer_sharding=self.outer_sharding)


@dataclass(frozen=True)
class Precision:
    """The dtypes of model states, of gradients on the wire and of the computation.

    `param`: of the parameters. `reduce`: of gradients on the wire. `accumulate`: of the sum of gradients. `master`: of
    the master weights, which the optimizer updates. `tf32`: true lets a GPU round the factors of fp32 matrix products
    to TF32.

    `compute`: auto is the dtype of `param`, or fp32 on a CPU without matrix instructions for that dtype. `keep_dtype`:
    parameters whose names match one of these patterns keep the dtype that they are built with (fp32), and their modules
    compute in it. `weights`: int8 or int4 stores and gathers the frozen matrices of the blocks as codes of 8 or 4 bits
    with a scale for each 64 elements, to train adapters beside them (adapter=lora) or to evaluate; null does not.

    The loss scale is for fp16 only. `loss_scale`: a number is a fixed scale; null scales the losses dynamically, as the
    following keys say. `initial_scale_power`: the first scale is 2 to this power. `loss_scale_window`: the scale
    doubles at the step after as many without overflow. `hysteresis`: overflows until the scale is halved.
    `consecutive_hysteresis`: a step without overflow sets that count back. `min_loss_scale`: the lowest scale.
    """

    dtypes: MixedPrecision = field(default=MixedPrecision("bf16"), metadata=part())
    compute: Compute = "auto"
    tf32: bool = False
    scale: LossScaleRule = field(default=LossScaleRule(), metadata=part())
    keep_dtype: list[str] = field(default_factory=list)

    @property
    def mixed(self) -> MixedPrecision:
        """All dtypes of a resolved configuration."""
        assert self.compute != "auto"
        return replace(self.dtypes, compute=self.compute)

    @property
    def scales_loss(self) -> bool:
        return self.dtypes.param == "fp16"


@dataclass(frozen=True)
class Offload:
    """Where parameter shards (`params`), and master weights and optimizer states (`optimizer`), are stored between
    their uses.

    `ratio`: the share of the trained elements whose units are offloaded.

    The other keys are for nvme only. `folder`: the folder of the scratch files; null is a folder in the output folder.
    `block_mib`: size of an I/O request. `requests`: the number of requests in flight. `ahead`: the number of units that
    are read ahead and written behind. `verify`: compare the data read back with the checksum of the data written.
    """

    params: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    ratio: float = 1.0
    folder: str | None = None
    block_mib: int = 4
    requests: int = 4
    ahead: int = 1
    verify: bool = True

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "offload")
        limits.must("folder", bool, "a folder, or null", None)
        limits.at_least(1, block_mib=4)
        limits.broken += dict.fromkeys(broken_by(self.scratch) + broken_by(self.plan))
        limits.conclude()

    @property
    def uses_nvme(self) -> bool:
        return Tier.NVME in (self.params, self.optimizer)

    def scratch(self) -> ScratchSettings:
        folder = Path(self.folder or ".")  # resolving the configuration fills in the folder in the output folder
        block_bytes = max(self.block_mib, 1) << 20  # the group checks block_mib itself, together with the others
        return ScratchSettings(folder, block_bytes, self.requests, self.ahead, self.verify)

    def plan(self) -> OffloadPlan:
        scratch = self.scratch() if self.uses_nvme else None
        return OffloadPlan(self.params, self.optimizer, self.ratio, scratch)
