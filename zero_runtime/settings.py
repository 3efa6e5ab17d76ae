"""The settings of a runtime, in addition to its plan and its precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero_runtime.divisions import WholeLayers, WholeSequences
from zero_runtime.initial_values import Initialise
from zero_runtime.offload_plan import OffloadPlan
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.tensor_source import TensorSource
from zero_runtime.watch.watch import RankWatch
from zero_runtime.wire import EXACT, Wire

NO_OFFLOAD = OffloadPlan()
WHOLE_LAYERS, WHOLE_SEQUENCES = WholeLayers(), WholeSequences()


@dataclass(frozen=True)
class RuntimeSettings:
    """The settings of a runtime, in addition to its plan and its precision.

    micro_batches: number of backward calls per step.
    clip_norm: the largest global gradient norm; None for no clipping.
    prefetch: number of units that are gathered ahead of the unit in use; changes the time, never the bits.
    loss_scale: how losses are scaled before backward; needed if precision.param or precision.compute is fp16.
    unit_numel: the number of elements that a unit may have; None makes each block one unit (unit_planner.py). Without
        clipping it changes no bits with one or two ranks.
    keep_dtype: patterns of the parameters that keep their dtype in the given model; all others are cast to
        precision.param.
    seed, initialise: the seed and the rule by which initial values of meta parameters are drawn (initial_values.py).
    offload: where the shards are stored between their uses.
    tensor_parallel: how many consecutive ranks hold slices of one model; they must be given the same batches.
    sequence_parallel: how many consecutive ranks hold the parts of the same sequences; they must be given the same
        batches.
    weights: a source of values for some or all meta parameters, by name; each rank reads its own shards instead of
        drawing them.
    read_host: copies the numbers that a step needs on the host from the device, once per step; a dry run on fake
        tensors provides its own function.
    watch: the watch that join_world returned. Without it, a rank that differs or dies is detected only by the backend's
        timeout.
    lazy_states: allocate the optimizer's states only when a step, an offload tier or a checkpoint first needs them, so
        inference never allocates them.
    stop_asked: called once per step; returns whether this rank wants training to stop, for example because of a signal.
        The answers of all ranks travel with the step's loss, so `StepReport.stop` is the same on all ranks. Either all
        ranks must give this function, or none.
    wire: which collectives send block-quantised values.
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
    wire: Wire = EXACT
    tensor_parallel: WholeLayers = WHOLE_LAYERS
    sequence_parallel: WholeSequences = WHOLE_SEQUENCES
