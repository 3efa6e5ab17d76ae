"""What a run decides beside its plan and its precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero_runtime.initial_values import Initialise
from zero_runtime.offload.memory import Moves
from zero_runtime.offload.plan import OffloadPlan, Tier
from zero_runtime.optim.configs import STATE_ITEMSIZE_BYTES, OptimizerConfig
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.tensor_source import TensorSource
from zero_runtime.watch.watch import RankWatch

NO_OFFLOAD = OffloadPlan()


@dataclass(frozen=True)
class RuntimeSettings:
    """What a run decides beside the plan and the precision.

    micro_batches: backward calls per step. clip_norm: the largest global gradient norm, None for no clipping.
    prefetch: how many units are gathered ahead of the one in use; changes time, never bits.
    loss_scale: how losses are scaled before backward; needed where precision.param or compute is fp16.
    unit_numel: how many elements a unit may have; None makes one unit of each block (unit_planner.py). Without
        clipping it changes no bits at worlds 1 and 2.
    keep_dtype: patterns of the parameters that keep the dtype they came with; all others are cast to precision.param.
    seed, initialise: what the first values of parameters on the meta device are drawn from (initial_values.py).
    offload: where the shards rest between their uses.
    weights: has values for some or all of those parameters, by name; they are read instead, each rank its own shards.
    read_host: how the one read of a step takes numbers off the device; a dry run on fake tensors has its own.
    watch: what join_world returned; without it a rank that differs or dies is found by the backend's time-out.
    lazy_states: the optimizer's states come with the first step (or checkpoint), so inference never has them.
    stop_asked: asked once a step whether this rank wants training to stop, say because of a signal; the answers of all
        ranks travel with the step's loss, so `StepReport.stop` is true on all ranks alike. All ranks give it, or none.
    """

    micro_batches: int = 1
    clip_norm: float | None = None
    prefetch: int = 1
    loss_scale: LossScaleRule = UNSCALED
    unit_numel: int | None = None
    keep_dtype: tuple[str, ...] = ()
    seed: int = 0
    initialise: Initialise | None = None
    weights: TensorSource | None = None
    offload: OffloadPlan = NO_OFFLOAD
    read_host: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist
    watch: RankWatch | None = None
    stop_asked: Callable[[], bool] | None = None
    lazy_states: bool = False


def moves_of(settings: RuntimeSettings, config: OptimizerConfig, shard_count: int) -> Moves:
    """What decides how much offload has under way at once."""
    offload = settings.offload
    return Moves(
        shard_count,
        settings.prefetch,
        settings.micro_batches,
        tuple(STATE_ITEMSIZE_BYTES[held.dtype] / held.per for held in config.held_states),
        1 if offload.scratch is None else offload.scratch.ahead,
        offload.speculative,
        offload.params is Tier.NVME,
    )
