"""The top-level keys of a configuration and its sections, as DeepSpeed publishes them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from zero_runtime.deepspeed import zero_section
from zero_runtime.deepspeed.partition_section import PARTITION
from zero_runtime.deepspeed.schema import (
    BOOL,
    LIST,
    NUMBER,
    NUMBER_OR_INF,
    OBJECT,
    TEXT,
    WHOLE,
    Key,
    all_idle,
    all_mapped,
    choice,
    feature,
    homes_of,
    idle,
    mapped,
    only,
    section,
)

IN_CPU = ("cpu_checkpointing", "checkpoint_in_cpu")  # in a file, and as an argument of checkpointing.configure
_TOKENS = "each rank keeps those of its own tokens, with tensor parallelism too (exceptions: docs/parallel.md)"
RECOMPUTED = {
    **all_mapped(BOOL, *IN_CPU),
    **all_idle(BOOL, "partition_activations", reason=_TOKENS),
    **all_idle(BOOL, "contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile"),
    "number_checkpoints": idle(WHOLE),
}
_FLOPS_PROFILER = {
    **all_mapped(BOOL, "enabled", "detailed"),
    **all_mapped(WHOLE, "profile_step", "module_depth", "top_modules"),
    **{"output_file": mapped(TEXT), "recompute_fwd_factor": idle(NUMBER)},
}
_FP16 = {
    **all_mapped(BOOL, "enabled", "auto_cast", "consecutive_hysteresis"),
    **all_mapped(NUMBER, "loss_scale", "min_loss_scale"),
    **all_mapped(WHOLE, "initial_scale_power", "loss_scale_window", "hysteresis"),
    "fused_mode": idle(BOOL),
    "fp16_master_weights_and_grads": only(
        False, kind=BOOL, reason="updates below 6e-8 vanish in fp16 weights, so the masters are fp32"
    ),
}
_BF16 = {
    **all_mapped(BOOL, "enabled", "bf16_master_weights_and_grads"),
    **all_idle(BOOL, "immediate_grad_update", "check_grad_overflow"),
    "bf16_optimizer_states": only(False, kind=BOOL, reason="optimizer states are fp32 here"),
}
_TENSOR_PARALLEL = {
    "enabled": mapped(BOOL),
    **all_mapped(WHOLE, "tp_size", "autotp_size"),
    "tp_group_size": idle(WHOLE),
    **all_idle(BOOL, "tp_overlap_comm", "verbose", "vocab_parallel_lm_head"),
    "preset_model": idle(TEXT),
    "partition_config": section(PARTITION),
    "vocab_parallel_ce_backend": only("torch", kind=TEXT, reason="the loss is torch's here"),
    "tp": section({"tp_size": mapped(WHOLE), "tp_grain_size": idle(WHOLE)}),
}
_DATA_TYPES = {
    **all_mapped(TEXT, "grad_accum_dtype", "param_dtype"),
    "buffer_dtype": choice("fp32", reason="buffers keep the model's dtype, or are fp32; cast them in the model"),
    "keep_in_fp32_modules": idle(LIST),  # only buffers are meant, and those keep their dtype
}
_TAG_MODES = [cased for mode in ("Ignore", "Warn", "Fail") for cased in (mode, mode.lower(), mode.upper())]
_CHECKPOINT = {
    "tag_validation": only(
        *_TAG_MODES, kind=TEXT, reason="tags that differ between ranks are an error here in each of these modes"
    ),
    "load_universal": idle(BOOL),
    "use_node_local_storage": mapped(BOOL),
    **all_idle(OBJECT, "parallel_write", "writer"),
}
_AIO = {
    **all_mapped(WHOLE, "block_size", "queue_depth"),
    **all_idle(WHOLE, "thread_count", "intra_op_parallelism"),
    **all_idle(BOOL, "single_submit", "overlap_events", "use_gds"),
}
# The engine's output, and where its `checkpointing.checkpoint` keeps inputs: an experiment has its own words for it.
OWN: dict[str, Key] = {
    "steps_per_print": mapped(NUMBER_OR_INF),
    **all_mapped(BOOL, "wall_clock_breakdown", "dump_state"),
    **{"flops_profiler": section(_FLOPS_PROFILER), "activation_checkpointing": section(RECOMPUTED)},
}
_ACTING: dict[str, Key] = {
    **all_mapped(WHOLE, "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    **all_mapped(WHOLE, "sequence_parallel_size", "data_parallel_size"),
    "gradient_clipping": mapped(NUMBER),
    "communication_data_type": mapped(TEXT),
    "data_types": section(_DATA_TYPES),
    **all_mapped(BOOL, "dataloader_drop_last", "managed_gradient_accumulation"),
    # The keys of `params` depend on the type; optimizer_section and schedules read them.
    "optimizer": section({"type": mapped(TEXT), "params": mapped(OBJECT), "legacy_fusion": idle(BOOL)}),
    "scheduler": section({"type": mapped(TEXT), "params": mapped(OBJECT)}),
    "fp16": section(_FP16),
    "bf16": section(_BF16),
    "checkpoint": section(_CHECKPOINT),
    "tensor_parallel": section(_TENSOR_PARALLEL),
    "zero_optimization": zero_section.SECTION,
    **OWN,
}
_IDLE: dict[str, Key] = {
    **all_idle(BOOL, "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "prescale_gradients"),
    **all_idle(BOOL, "memory_breakdown", "disable_allgather", "disable_python_gc"),
    **all_idle(TEXT, "seq_parallel_comm_data_type", "seq_parallel_communication_data_type", "log_level"),
    "gradient_predivide_factor": idle(NUMBER),
    "vocabulary_size": idle(WHOLE),
    "aio": section(_AIO),
    # Nothing in these sections has an effect, so their keys are not looked at.
    **all_idle(OBJECT, "timers", "nebula", "comms_logger"),
    **all_idle(OBJECT, "tensorboard", "wandb", "comet", "csv_monitor"),
}
_ABSENT = {
    "amp": "Apex' mixed precision (use fp16 or bf16)",
    "torch_autocast": "autocast by the engine (wrap your forward, or use fp16 or bf16)",
    "elasticity": "elastic training",
    "autotuning": "autotuning",
    "compile": "compilation by the engine (call torch.compile on your model)",
    "compression_training": "compression",
    "quantize_training": "quantised training",
    "sparse_attention": "sparse attention",
    "progressive_layer_drop": "progressive layer drop",
    "curriculum_learning": "curriculum learning",
    "data_efficiency": "data efficiency",
    "eigenvalue": "eigenvalue estimation",
    "graph_harvesting": "graph harvesting",
    "expert_parallel": "expert parallelism",
    "hybrid_engine": "the hybrid engine",
    "pipeline": "pipeline parallelism",
}
_REFUSED: dict[str, Key] = {
    "gradient_allreduce_op": only("mean", kind=TEXT, reason="the engine averages over the ranks; sum in your loss"),
    "sparse_gradients": only(False, kind=BOOL, reason="the runtime's gradients are dense"),
    **{name: feature(f"{what} is not here; switch it off or leave it out") for name, what in _ABSENT.items()},
}
TOP: Mapping[str, Key] = {**_ACTING, **_IDLE, **_REFUSED}
HOMES = homes_of(TOP)
