"""Frozen weights that are stored as codes (precision.weights): what they do not go with. Pure."""

from __future__ import annotations

from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Adapter, AdapterKind, Measure, MeasureKind, Model
from orchestrator.config.state_groups import Offload, Zero
from orchestrator.config.strict import Broken
from zero_runtime.offload_plan import Tier

UNCODED = "precision.weights=null"


def broken(
    weights: str, adapter: Adapter, measure: Measure, model: Model, parallel: Parallel, offload: Offload, zero: Zero
) -> Broken | None:
    """The first rule that a point breaks: codes are not updated, have no adapters merged into them, and are whole
    matrices on the device."""
    key = f"precision.weights={weights}"
    if model.adapter is not None:
        rule = f"{key} would round the adapters of model.adapter together with their base"
        return Broken(rule, model.adapter, (UNCODED,))
    if measure.kind is not MeasureKind.eval and adapter.kind is not AdapterKind.lora:
        rule = f"{key} trains with adapter=lora: the quantised weights are frozen, because an update is smaller than"
        return Broken(f"{rule} the distance of two codes", f"adapter={adapter.kind}", ("adapter=lora", UNCODED))
    if parallel.tp > 1 or offload.params is not Tier.DEVICE:
        found = f"parallel.tp={parallel.tp} offload.params={offload.params}"
        fixes = ("parallel.tp=1 offload.params=device", UNCODED)
        return Broken(f"{key} keeps whole matrices on the device, which zero.stage=3 shards", found, fixes)
    if zero.wire.gather is not None or zero.outer_sharding is not None:
        found = f"zero.gather_dtype={zero.wire.gather or 'null'} zero.outer_sharding={zero.outer_sharding or 'null'}"
        fixes = ("zero.gather_dtype=null zero.outer_sharding=null", UNCODED)
        return Broken(f"{key} gathers codes as they are stored, in one group of ranks", found, fixes)
    return None
