"""The section zero_optimization, with the key names that DeepSpeed publishes, and the plan that it describes.

Outside plan.py, names and strings do not contain the word "stage", except in the modules that read DeepSpeed's formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero_runtime.deepspeed.schema import (
    BOOL,
    NUMBER,
    TEXT,
    TEXTS,
    WHOLE,
    Reader,
    all_idle,
    all_mapped,
    choice,
    feature,
    idle,
    mapped,
    only,
    section,
)
from zero_runtime.plan import ZeroPlan

_DEVICE = choice("none", "cpu", "nvme", reason="states are stored on the device, in host memory, or in a file")
_WHOLE_WEIGHTS = (
    "weights are stored in their own dtype; zero_quantized_weights quantises their gathers; set it to false"
)
_LOCO = (
    "LoCo, whose errors fade and are dropped after some steps, is not here (zero.error_feedback=true of the command "
    "line keeps them); leave it out"
)
# Paths of the key that at 0 means the same here: nothing is gathered ahead.
AHEAD = ("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size")
_OLD_NAMES = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}

OFFLOAD_PARAM = {
    "device": _DEVICE,
    "nvme_path": mapped(TEXT),
    "pin_memory": idle(BOOL),
    # DeepSpeed's buffers hold a tensor each. Ours hold the record of a unit, and their number follows from `ahead`.
    **all_idle(WHOLE, "buffer_count", "buffer_size", "max_in_cpu"),
}
OFFLOAD_OPTIMIZER = {
    "device": _DEVICE,
    "ratio": mapped(NUMBER),
    "nvme_path": mapped(TEXT),
    **all_mapped(BOOL, "pipeline_read", "pipeline_write"),
    "super_offload": only(False, kind=BOOL, reason="SuperOffload is not here; set it to false"),
    **all_idle(BOOL, "pin_memory", "fast_init", "convert_grad_on_cpu"),
    "buffer_count": idle(WHOLE),
    "cpuadam_cores_perc": idle(NUMBER),
}
_UNITS = "each block is one unit, which is gathered one ahead, reduced and updated as a whole"
# DeepSpeed accepts these keys with the prefix stage3_ and without it.
_OF_STAGE_3 = {
    "prefetch_bucket_size": idle(WHOLE, _UNITS, acts_at=0),
    **all_idle(WHOLE, "param_persistence_threshold", "model_persistence_threshold", reason=_UNITS),
    **all_idle(WHOLE, "max_live_parameters", "max_reuse_distance", "module_granularity_threshold", reason=_UNITS),
    **all_idle(BOOL, "gather_16bit_weights_on_model_save", "use_all_reduce_for_fetch_params", "allgather_sequential"),
}
_IDLE = {
    **all_idle(BOOL, "contiguous_gradients", "reduce_scatter", "allgather_partitions", "overlap_comm", reason=_UNITS),
    **all_idle(BOOL, "use_multi_rank_bucket_allreduce", "parameter_alignment", "load_from_fp32_weights"),
    **all_idle(BOOL, "compute_grad_norm"),  # it is computed anyway
    **all_idle(BOOL, "elastic_checkpoint", "legacy_stage1", "round_robin_gradients", "mics_hierarchical_params_gather"),
    **all_idle(BOOL, "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
    **all_idle(BOOL, "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
    **all_idle(BOOL, "stage3_gather_fp16_weights_on_model_save", "cpu_offload_use_pin_memory"),
    **all_idle(WHOLE, "reduce_bucket_size", "allgather_bucket_size", "sub_group_size", reason=_UNITS),
    **all_idle(WHOLE, "stage3_partition_stream_chunk_size"),
    **_OF_STAGE_3,
    **{f"stage3_{name}": key for name, key in _OF_STAGE_3.items()},
}
ZERO = {
    **all_mapped(WHOLE, "stage", "mics_shard_size", "zero_hpz_partition_size"),
    **all_mapped(BOOL, "zero_quantized_weights", "zero_quantized_gradients", "cpu_offload", "cpu_offload_param"),
    "offload_param": section(OFFLOAD_PARAM),
    "offload_optimizer": section(OFFLOAD_OPTIMIZER),
    "ignore_unused_parameters": only(
        True, kind=BOOL, reason="unused parameters count as zero gradients here, and are no error"
    ),
    "leaf_module": section(all_mapped(TEXTS, "classes", "names", "name_suffixes")),
    "zero_quantized_nontrainable_weights": only(False, kind=BOOL, reason=_WHOLE_WEIGHTS),
    "zeropp_loco_param": feature(_LOCO),
    "zenflow": feature("ZenFlow is not here; leave it out"),
    **_IDLE,
}
SECTION = section(ZERO)
ZERO_LEVEL = "stage"
# What a Trainer fills in for "auto", from the model's hidden size.
SIZES_BY_HIDDEN: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
STAGES = (0, 1, 2, 3)


def with_new_names(values: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """The section as read by the table ZERO, with deprecated keys replaced by the sections that replaced them."""
    renamed = {name: value for name, value in values.items() if name not in _OLD_NAMES}
    for old, new in _OLD_NAMES.items():
        if old in values and new in values:
            reader.problems.append(
                f"zero_optimization.{old}: expected it or {new}, which replaced it, found both; keep {new}"
            )
        elif old in values:
            reader.older[f"zero_optimization.{old}"] = f"zero_optimization.{new}"
            renamed |= {new: {"device": "cpu"}} if values[old] else {}
    return renamed


def read_plan(values: Mapping[str, Any], reader: Reader) -> ZeroPlan:
    """The plan for a section that `with_new_names` returned; invalid values are added to the reader's problems."""
    stage = values.get("stage", 0)
    if stage not in STAGES:
        reader.refuse("zero_optimization.stage", f"expected 0, 1, 2 or 3, found {stage}")
        return ZeroPlan.from_stage(3)  # this plan allows every offload, so it adds no further problem
    _check_offload(values, stage, reader)
    shard_ranks = values.get("mics_shard_size", -1)
    if shard_ranks > 0 and stage != 3:
        reader.problems.append(
            f"zero_optimization.mics_shard_size: expected stage 3 beside it, found stage {stage}; leave it out"
        )
        shard_ranks = -1
    reader.unused("zero_optimization", values, ["zero_hpz_partition_size"])
    if values.get("zero_hpz_partition_size", 1) != 1:
        reader.notes.append(
            "zero_hpz_partition_size: no second partition is here: parameters are gathered from all ranks, with the "
            "same numbers; zero.outer_sharding=optim of the command line keeps them in groups"
        )
    with reader.collecting("zero_optimization"):
        return ZeroPlan.from_stage(stage, shard_ranks=shard_ranks if shard_ranks > 0 else None)
    return ZeroPlan.from_stage(3)  # already refused; this plan is valid, so it adds no further problem


def _check_offload(values: Mapping[str, Any], stage: int, reader: Reader) -> None:
    """Refuse values that DeepSpeed cannot run at these stages, so no script can intend them; the runtime could.

    nvme at stages 1 and 2 is accepted: DeepSpeed documents it for stage 3 only, but its engine takes it there and keeps
    the states in memory, so scripts contain it. Here the states are stored on the disk.
    """
    params, optimizer = values.get("offload_param", {}), values.get("offload_optimizer", {})
    if stage < 3 and params.get("device", "none") != "none":
        reader.notes.append(
            f"zero_optimization.offload_param has no effect at stage {stage}, as in DeepSpeed: every rank holds all "
            "parameters on its device; stage 3 offloads them"
        )
    where = "zero_optimization.offload_optimizer"
    device, ratio = optimizer.get("device", "none"), optimizer.get("ratio", 1)
    if device != "none" and stage < 1:
        reader.refuse(
            f"{where}.device",
            f"{device!r} needs stage 1 or more, found stage {stage}; set it, or leave the section out",
        )
    if ratio != 1 and stage < 3:
        reader.refuse(
            f"{where}.ratio",
            f"{ratio!r}, a part of the optimizer's states, needs stage 3, found stage {stage}; set it, or leave the "
            "ratio out",
        )
