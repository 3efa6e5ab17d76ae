"""Rules for an evaluation, which has weights and no training."""

from __future__ import annotations

from orchestrator.config.schema import (
    Adapter,
    AdapterKind,
    Batch,
    Checkpoint,
    CheckpointKind,
    Data,
    Measure,
    MeasureKind,
)
from orchestrator.config.state_groups import Offload, Zero
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene
from zero_runtime.limits import broken_by
from zero_runtime.offload_plan import Tier


def inference_shards_weights(scene: Scene, zero: Zero, measure: Measure) -> Broken | None:
    if measure.kind is not MeasureKind.eval:
        return None
    return next(iter(broken_by(zero.plan.check_inference)), None)


def inference_sends_weights_as_stored(scene: Scene, zero: Zero, measure: Measure) -> Broken | None:
    if measure.kind is not MeasureKind.eval:
        return None
    return next(iter(broken_by(zero.wire.check_inference)), None)


def inference_offloads_weights(scene: Scene, offload: Offload, measure: Measure) -> Broken | None:
    if measure.kind is not MeasureKind.eval or offload.optimizer in (Tier.DEVICE, offload.params):
        return None
    rule = "measure=eval has no optimizer states to offload"
    return Broken(rule, f"offload.optimizer={offload.optimizer}", ("offload=none",))


def evaluation_has_data(scene: Scene, data: Data, measure: Measure) -> Broken | None:
    if measure.kind is not MeasureKind.eval or data.validation_fraction > 0:
        return None
    rule = "measure=eval needs held-out data: data.validation_fraction above 0"
    return Broken(rule, "0", ("data.validation_fraction=0.05",))


def evaluation_saves_nothing(scene: Scene, checkpoint: Checkpoint, measure: Measure) -> Broken | None:
    if measure.kind is not MeasureKind.eval or checkpoint.kind is CheckpointKind.none:
        return None
    rule = "measure=eval trains nothing that could be saved; weights to evaluate are given by model.path"
    return Broken(rule, f"checkpoint={checkpoint.kind}", ("checkpoint=none",))


def evaluation_has_no_new_adapters(scene: Scene, adapter: Adapter, measure: Measure) -> Broken | None:
    if measure.kind is not MeasureKind.eval or adapter.kind is AdapterKind.none:
        return None
    rule = "measure=eval would evaluate adapters that were never trained, which change nothing"
    return Broken(rule, f"adapter={adapter.kind}", ("adapter=none",))


def evaluation_accumulates_nothing(scene: Scene, batch: Batch, measure: Measure) -> Broken | None:
    if measure.kind is not MeasureKind.eval:
        return None
    if batch.accumulation in (None, 1) and batch.global_size is None:
        return None
    rule = "measure=eval has one micro-batch per batch of a rank"
    found = f"batch.accumulation={batch.accumulation} batch.global_size={batch.global_size}"
    return Broken(rule, found, ("batch.accumulation=null batch.global_size=null",))
