"""The section zero_optimization, by the names that DeepSpeed publishes, and the plan that it asks for.

Beside plan.py the only file with the word "stage": it stands in the published names of these keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_runtime.dropin.schema import (
    ANY,
    BOOL,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    Reader,
    feature,
    idle,
    mapped,
    only,
    section,
)
from zero_runtime.errors import PlanError
from zero_runtime.plan import ZeroPlan

_NOT_YET = 'offloading is not here yet; set device to "none" or leave the section out'
_QUANTISED = "quantised communication is not here; set it to false"
_OLD_OFFLOAD = "offloading is not here yet, and this name of it is deprecated; leave it out"

OFFLOAD_PARAM = {
    "device": mapped(TEXT),
    "pin_memory": idle(BOOL),
    "nvme_path": idle(TEXT),
    "buffer_count": idle(WHOLE),
    "buffer_size": idle(WHOLE),
    "max_in_cpu": idle(WHOLE),
}
OFFLOAD_OPTIMIZER = {
    "device": mapped(TEXT),
    "ratio": mapped(NUMBER),
    "pin_memory": idle(BOOL),
    "nvme_path": idle(TEXT),
    "buffer_count": idle(WHOLE),
    "pipeline_read": idle(BOOL),
    "pipeline_write": idle(BOOL),
    "fast_init": idle(BOOL),
    "super_offload": only(False, kind=BOOL, reason="offloading is not here yet"),
    "cpuadam_cores_perc": idle(NUMBER),
}
ZERO = {
    "stage": mapped(WHOLE),
    "mics_shard_size": mapped(WHOLE),
    "offload_param": section(OFFLOAD_PARAM),
    "offload_optimizer": section(OFFLOAD_OPTIMIZER),
    "contiguous_gradients": idle(BOOL),
    "reduce_scatter": idle(BOOL),
    "reduce_bucket_size": idle(WHOLE),
    "use_multi_rank_bucket_allreduce": idle(BOOL),
    "allgather_partitions": idle(BOOL),
    "allgather_bucket_size": idle(WHOLE),
    "overlap_comm": idle(BOOL),
    "load_from_fp32_weights": idle(BOOL),
    "elastic_checkpoint": idle(BOOL),
    "sub_group_size": idle(WHOLE),
    "stage3_prefetch_bucket_size": idle(WHOLE),
    "stage3_param_persistence_threshold": idle(WHOLE),
    "stage3_model_persistence_threshold": idle(WHOLE),
    "stage3_max_live_parameters": idle(WHOLE),
    "stage3_max_reuse_distance": idle(WHOLE),
    "stage3_gather_16bit_weights_on_model_save": idle(BOOL),
    "stage3_gather_fp16_weights_on_model_save": idle(BOOL),
    "stage3_module_granularity_threshold": idle(WHOLE),
    "stage3_use_all_reduce_for_fetch_params": idle(BOOL),
    "stage3_allgather_sequential": idle(BOOL),
    "stage3_partition_stream_chunk_size": idle(WHOLE),
    "ignore_unused_parameters": only(
        True, kind=BOOL, reason="unused parameters count as zero gradients here, and are no error"
    ),
    "legacy_stage1": idle(BOOL),
    "round_robin_gradients": idle(BOOL),
    "mics_hierarchical_params_gather": idle(BOOL),
    "memory_efficient_linear": idle(BOOL),
    "pipeline_loading_checkpoint": idle(BOOL),
    "override_module_apply": idle(BOOL),
    "log_trace_cache_warnings": idle(BOOL),
    "enable_sanity_checks": idle(BOOL),
    "save_muon_momentum_buffer_in_memory": idle(BOOL),
    "leaf_module": idle(OBJECT),
    "zero_hpz_partition_size": only(1, kind=WHOLE, reason="a second partition of the parameters is not here"),
    "zero_quantized_weights": only(False, kind=BOOL, reason=_QUANTISED),
    "zero_quantized_nontrainable_weights": only(False, kind=BOOL, reason=_QUANTISED),
    "zero_quantized_gradients": only(False, kind=BOOL, reason=_QUANTISED),
    "zeropp_loco_param": feature(_QUANTISED),
    "zenflow": feature("ZenFlow is not here; leave it out"),
    "cpu_offload": only(False, kind=BOOL, reason=_OLD_OFFLOAD),
    "cpu_offload_param": only(False, kind=BOOL, reason=_OLD_OFFLOAD),
    "cpu_offload_use_pin_memory": idle(BOOL),
}
# true and false were the whole section once; the table above reads objects alone.
SECTION = section(ZERO)
__all__ = ["ANY", "SECTION", "ZERO", "read_plan"]


def read_plan(values: Mapping[str, Any], reader: Reader) -> ZeroPlan:
    """The plan of a section that was read by ZERO; what cannot be is added to the reader's problems."""
    stage = values.get("stage", 0)
    _check_offload(values, stage, reader)
    shard_ranks = values.get("mics_shard_size", -1)
    if shard_ranks > 0 and stage != 3:
        reader.problems.append(
            f"zero_optimization.mics_shard_size: expected stage 3 beside it, found stage {stage}; leave it out"
        )
        return ZeroPlan.from_stage(0)
    try:
        return ZeroPlan.from_stage(stage, shard_ranks=shard_ranks if shard_ranks > 0 else None)
    except PlanError as error:
        reader.problems.append(f"zero_optimization: {error}")
        return ZeroPlan.from_stage(0)


def _check_offload(values: Mapping[str, Any], stage: int, reader: Reader) -> None:
    for name, least in (("offload_param", 3), ("offload_optimizer", 1)):
        device = values.get(name, {}).get("device", "none")
        where = f"zero_optimization.{name}"
        if device not in ("none", "cpu", "nvme"):
            reader.problems.append(f'{where}.device: expected "none", found {device!r}')
        elif device != "none":
            below = f"it needs stage {least} or more, found stage {stage}; and " if stage < least else ""
            reader.problems.append(f"{where}.device: found {device!r}: {below}{_NOT_YET}")
    ratio = values.get("offload_optimizer", {}).get("ratio", 1)
    if ratio != 1:
        below = f"a part of the optimizer on the CPU needs stage 3, found stage {stage}; and " if stage < 3 else ""
        reader.problems.append(f"zero_optimization.offload_optimizer.ratio: found {ratio!r}: {below}{_NOT_YET}")
