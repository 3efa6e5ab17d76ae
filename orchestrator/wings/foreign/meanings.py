"""Which settings of conf/ say what a key of DeepSpeed says, for the keys that have an effect."""

from __future__ import annotations

from collections.abc import Mapping

from zero_runtime.deepspeed.zero_section import AHEAD

_SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_NVME = ("offload.folder",)
_LEAVES = ("classes", "names", "name_suffixes")
_PARTS = ("layer_specs", "use_default_specs")
_TP_SIZES = ("tp_size", "autotp_size", "tp.tp_size")
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "train_batch_size": ("batch.micro", "batch.accumulation"),
    "train_micro_batch_size_per_gpu": ("batch.micro",),
    "gradient_accumulation_steps": ("batch.accumulation",),
    "gradient_clipping": ("optimizer.clip_norm",),
    "communication_data_type": ("precision.reduce",),
    "data_types.grad_accum_dtype": ("precision.accumulate",),
    "fp16.enabled": ("precision",),
    **{f"fp16.{key}": (f"precision.{key}",) for key in (*_SCALE, "consecutive_hysteresis")},
    "bf16.enabled": ("precision",),
    "bf16.bf16_master_weights_and_grads": ("precision",),
    "zero_optimization": ("zero",),
    "zero_optimization.stage": ("zero",),
    "zero_optimization.mics_shard_size": ("zero.shard_ranks",),
    "zero_optimization.zero_quantized_weights": ("zero.gather_dtype",),
    "zero_optimization.zero_quantized_gradients": ("zero.reduce_dtype",),
    **dict.fromkeys(AHEAD, ("zero.prefetch",)),
    "zero_optimization.cpu_offload": ("offload",),
    "zero_optimization.cpu_offload_param": ("offload",),
    "zero_optimization.offload_param.device": ("offload",),
    "zero_optimization.offload_param.nvme_path": _NVME,
    "zero_optimization.offload_optimizer.device": ("offload",),
    "zero_optimization.offload_optimizer.ratio": ("offload.ratio",),
    "zero_optimization.offload_optimizer.nvme_path": _NVME,
    "zero_optimization.offload_optimizer.pipeline_read": ("offload.ahead",),
    "zero_optimization.offload_optimizer.pipeline_write": ("offload.ahead",),
    **{f"tensor_parallel.{key}": ("parallel.tp",) for key in _TP_SIZES},
    "sequence_parallel_size": ("parallel.sp",),
    "aio.block_size": ("offload.block_mib",),
    "aio.queue_depth": ("offload.requests",),
    "optimizer.type": ("optimizer",),
    "optimizer.params.lr": ("optimizer.lr",),
    "optimizer.params.betas": ("optimizer.beta1", "optimizer.beta2"),
    "optimizer.params.freeze_step": ("optimizer.warmup_updates",),
    "optimizer.params.adam_w_mode": ("optimizer",),
    "optimizer.params.bias_correction": ("optimizer.correction",),
    "scheduler.type": ("scheduler",),
    "scheduler.params.warmup_min_lr": ("scheduler.start_lr_ratio",),
    "scheduler.params.warmup_max_lr": ("optimizer.lr",),
    "scheduler.params.warmup_num_steps": ("scheduler.warmup_steps",),
    "scheduler.params.warmup_type": ("scheduler.warmup_type",),
    "scheduler.params.warmup_min_ratio": ("scheduler.start_lr_ratio",),
    "scheduler.params.cos_min_ratio": ("scheduler.min_lr_ratio",),
    "scheduler.params.cycle_min_lr": ("scheduler.start_lr_ratio",),
    "scheduler.params.cycle_max_lr": ("optimizer.lr",),
    "scheduler.params.cycle_first_step_size": ("scheduler.rise_steps",),
    "scheduler.params.cycle_second_step_size": ("scheduler.fall_steps",),
    "scheduler.params.decay_step_size": ("scheduler.decay_steps",),
    "scheduler.params.decay_lr_rate": ("scheduler.decay_rate",),
    "scheduler.params.cycle_min_mom": ("scheduler.momentum_min",),
    "scheduler.params.cycle_max_mom": ("scheduler.momentum_max",),
    "scheduler.params.cycle_momentum": ("scheduler.momentum_min", "scheduler.momentum_max"),
    "scheduler.params.lr_range_test_min_lr": ("optimizer.lr",),
    "scheduler.params.lr_range_test_step_size": ("scheduler.interval_steps",),
    "scheduler.params.lr_range_test_step_rate": ("scheduler.interval_rate",),
    "scheduler.params.lr_range_test_staircase": ("scheduler.staircase",),
}
# Keys with an effect that no setting says, or whose setting is the default: why.
UNSAID: Mapping[str, str] = {
    "fp16.auto_cast": "a model here gets tokens, whose embeddings are fp16 already",
    "data_types.param_dtype": "fp16 and bf16 say it",
    "data_types.buffer_dtype": "buffers keep their dtype",
    "dataloader_drop_last": "only full batches are made here",
    "managed_gradient_accumulation": "micro-batches are counted here",
    "zero_optimization.zero_hpz_partition_size": "parameters are gathered from all ranks",
    "tensor_parallel.enabled": "its size says it",
    **dict.fromkeys((f"tensor_parallel.{key}" for key in _TP_SIZES), "layers are not divided"),
    **dict.fromkeys((f"zero_optimization.leaf_module.{key}" for key in _LEAVES), "a block is a unit here"),
    **dict.fromkeys((f"tensor_parallel.partition_config.{key}" for key in _PARTS), "parallel.patterns says it"),
    "checkpoint.use_node_local_storage": "checkpoint.node_folder names the folder",
    "sequence_parallel_size": "sequences are not divided",
    "data_parallel_size": "the ranks that are left",
    "optimizer.params.torch_adam": "the updates are torch's here in any case",
    "scheduler.params.total_num_steps": "the length of the run here",
    "scheduler.params.cycle_first_stair_count": "no stairs",
    "scheduler.params.cycle_second_stair_count": "no stairs",
    "scheduler.params.decay_mom_rate": "no decay of the momentum",
}


def settings_of(path: str) -> tuple[str, ...]:
    """The settings that say what the key at this path says; other constants of an optimizer have their own name."""
    path = "bf16" + path.removeprefix("bfloat16") if path.startswith("bfloat16.") else path
    if path in SETTINGS:
        return SETTINGS[path]
    prefix = "optimizer.params."
    return (f"optimizer.{path.removeprefix(prefix)}",) if path.startswith(prefix) else ()
