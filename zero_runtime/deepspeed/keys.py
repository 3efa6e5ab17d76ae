"""The top-level keys of a configuration and its sections, as DeepSpeed publishes them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from zero_runtime.deepspeed import zero_section
from zero_runtime.deepspeed.schema import (
    ANY,
    BOOL,
    LIST,
    NUMBER,
    NUMBER_OR_INF,
    OBJECT,
    TEXT,
    WHOLE,
    Key,
    choice,
    feature,
    homes_of,
    idle,
    mapped,
    only,
    section,
)

_FP16 = {
    "enabled": mapped(BOOL),
    "auto_cast": mapped(BOOL),
    "loss_scale": mapped(NUMBER),
    "initial_scale_power": mapped(WHOLE),
    "loss_scale_window": mapped(WHOLE),
    "hysteresis": mapped(WHOLE),
    "consecutive_hysteresis": mapped(BOOL),
    "min_loss_scale": mapped(NUMBER),
    "fused_mode": idle(BOOL),
    "fp16_master_weights_and_grads": only(
        False, kind=BOOL, reason="updates below 6e-8 vanish in fp16 weights, so the masters are fp32"
    ),
}
_BF16 = {
    "enabled": mapped(BOOL),
    "immediate_grad_update": idle(BOOL),
    "check_grad_overflow": idle(BOOL),
    "bf16_master_weights_and_grads": mapped(BOOL),
    "bf16_optimizer_states": only(False, kind=BOOL, reason="optimizer states are fp32 here"),
}
_TENSOR_PARALLEL = {
    "enabled": mapped(BOOL),
    "tp_size": mapped(WHOLE),
    "autotp_size": mapped(WHOLE),
    "tp_group_size": idle(WHOLE),
    "tp_overlap_comm": idle(BOOL),
    "verbose": idle(BOOL),
    "preset_model": idle(TEXT),
    "partition_config": feature("the model's own plan or structure says how layers are divided; leave it out"),
    "tp": section({"tp_size": mapped(WHOLE), "tp_grain_size": idle(WHOLE)}),
}
_NO_COMPILATION = "compilation by the engine is not here; call torch.compile on your model, or set it to false"
_COMPILE = {
    "enabled": only(False, kind=BOOL, reason=_NO_COMPILATION),
    "deepcompile": only(False, kind=BOOL, reason=_NO_COMPILATION),
    "disable": only(True, kind=BOOL, reason="compilation by the engine is not here; set it to true"),
    "backend": idle(TEXT),
    "kwargs": idle(OBJECT),
    "passes": idle(LIST),
    "free_activation_threshold": idle(WHOLE),
    **dict.fromkeys(
        (
            *("free_activation", "offload_activation", "offload_activation_pin_memory", "offload_opt_states"),
            *("offload_parameters", "double_buffer", "symmetric_memory", "debug_log", "keep_int_input_tensors"),
            *("keep_all_input_tensors", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather"),
            "sync_after_allgather",
        ),
        idle(BOOL),
    ),
}
_FLOPS_PROFILER = {
    "enabled": idle(BOOL),
    "recompute_fwd_factor": idle(NUMBER),
    "profile_step": idle(WHOLE),
    "module_depth": idle(WHOLE),
    "top_modules": idle(WHOLE),
    "detailed": idle(BOOL),
    "output_file": idle(TEXT),
}
_ACTIVATION_CHECKPOINTING = {
    "partition_activations": idle(BOOL),
    "cpu_checkpointing": idle(BOOL),
    "contiguous_memory_optimization": idle(BOOL),
    "number_checkpoints": idle(WHOLE),
    "synchronize_checkpoint_boundary": idle(BOOL),
    "profile": idle(BOOL),
}
_COMMS_LOGGER = {
    "enabled": idle(BOOL),
    "verbose": idle(BOOL),
    "prof_all": idle(BOOL),
    "prof_ops": idle(LIST),
    "debug": idle(BOOL),
}
_AIO = {
    "block_size": mapped(WHOLE),
    "queue_depth": mapped(WHOLE),
    "thread_count": idle(WHOLE),
    "intra_op_parallelism": idle(WHOLE),
    "single_submit": idle(BOOL),
    "overlap_events": idle(BOOL),
    "use_gds": idle(BOOL),
}
_TAG_MODES = [cased for mode in ("Ignore", "Warn", "Fail") for cased in (mode, mode.lower(), mode.upper())]
_CHECKPOINT = {
    "tag_validation": only(
        *_TAG_MODES, kind=TEXT, reason="tags that differ between ranks are an error here in each of these modes"
    ),
    "load_universal": idle(BOOL),
    "use_node_local_storage": idle(BOOL),
    "parallel_write": idle(OBJECT),
    "writer": idle(OBJECT),
}
_DATA_TYPES = {
    "grad_accum_dtype": mapped(TEXT),
    "param_dtype": mapped(TEXT),
    "buffer_dtype": choice("fp32", reason="buffers keep the model's dtype, or are fp32; cast them in the model"),
    "keep_in_fp32_modules": idle(LIST),  # only buffers are meant, and those keep their dtype
}
_MONITOR = {
    "enabled": idle(BOOL),
    "output_path": idle(TEXT),
    "job_name": idle(TEXT),
    "group": idle(TEXT),
    "team": idle(TEXT),
    "project": idle(TEXT),
    "workspace": idle(TEXT),
    "api_key": idle(TEXT),
    "experiment_name": idle(TEXT),
    "experiment_key": idle(TEXT),
    "online": idle(BOOL),
    "mode": idle(TEXT),
    "samples_log_interval": idle(WHOLE),
}
_ACTING: dict[str, Key] = {
    "train_batch_size": mapped(WHOLE),
    "train_micro_batch_size_per_gpu": mapped(WHOLE),
    "gradient_accumulation_steps": mapped(WHOLE),
    "gradient_clipping": mapped(NUMBER),
    "communication_data_type": mapped(TEXT),
    "data_types": section(_DATA_TYPES),
    "dataloader_drop_last": mapped(BOOL),
    "managed_gradient_accumulation": mapped(BOOL),
    # The keys of `params` depend on the type; optimizer_section and schedules read them.
    "optimizer": section({"type": mapped(TEXT), "params": mapped(OBJECT), "legacy_fusion": idle(BOOL)}),
    "scheduler": section({"type": mapped(TEXT), "params": mapped(OBJECT)}),
    "fp16": section(_FP16),
    "bf16": section(_BF16),
    "tensor_parallel": section(_TENSOR_PARALLEL),
    "sequence_parallel_size": mapped(WHOLE),
    "data_parallel_size": mapped(WHOLE),
    "zero_optimization": zero_section.SECTION,
}
_IDLE: dict[str, Key] = {
    "zero_allow_untested_optimizer": idle(BOOL),
    "zero_force_ds_cpu_optimizer": idle(BOOL),
    "prescale_gradients": idle(BOOL),
    "gradient_predivide_factor": idle(NUMBER),
    "seq_parallel_comm_data_type": idle(TEXT),
    "seq_parallel_communication_data_type": idle(TEXT),
    "steps_per_print": idle(NUMBER_OR_INF),
    "wall_clock_breakdown": idle(BOOL),
    "memory_breakdown": idle(BOOL),
    "dump_state": idle(BOOL),
    "disable_allgather": idle(BOOL),
    "disable_python_gc": idle(BOOL),
    "log_level": idle(TEXT),
    "vocabulary_size": idle(WHOLE),
    "timers": idle(OBJECT),
    "nebula": idle(OBJECT),
    "flops_profiler": section(_FLOPS_PROFILER),
    "activation_checkpointing": section(_ACTIVATION_CHECKPOINTING),
    "comms_logger": section(_COMMS_LOGGER),
    "aio": section(_AIO),
    "checkpoint": section(_CHECKPOINT),
    "tensorboard": section(_MONITOR),
    "wandb": section(_MONITOR),
    "comet": section(_MONITOR),
    "csv_monitor": section(_MONITOR),
}


def _absent(what: str) -> Key:
    return feature(f"{what} is not here; switch it off or leave it out")


_REFUSED: dict[str, Key] = {
    "gradient_allreduce_op": only("mean", kind=TEXT, reason="the engine averages over the ranks; sum in your loss"),
    "sparse_gradients": only(False, kind=BOOL, reason="the runtime's gradients are dense"),
    "pipeline": Key(ANY, only=(), reason="pipeline parallelism is not here; leave it out"),
    "amp": _absent("Apex' mixed precision (use fp16 or bf16)"),
    "torch_autocast": _absent("autocast by the engine (wrap your forward, or use fp16 or bf16)"),
    "elasticity": _absent("elastic training"),
    "autotuning": _absent("autotuning"),
    "compile": section(_COMPILE),
    "compression_training": _absent("compression"),
    "quantize_training": _absent("quantised training"),
    "sparse_attention": _absent("sparse attention"),
    "progressive_layer_drop": _absent("progressive layer drop"),
    "curriculum_learning": _absent("curriculum learning"),
    "data_efficiency": _absent("data efficiency"),
    "eigenvalue": _absent("eigenvalue estimation"),
    "graph_harvesting": _absent("graph harvesting"),
    "expert_parallel": _absent("expert parallelism"),
    "hybrid_engine": _absent("the hybrid engine"),
}
TOP: Mapping[str, Key] = {**_ACTING, **_IDLE, **_REFUSED}
HOMES = homes_of(TOP)
