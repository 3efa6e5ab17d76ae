"""The names of transformers' TrainingArguments: those with a meaning here, those without effect, and older names."""

from __future__ import annotations

BOOL, WHOLE, NUMBER, TEXT = "true or false", "a whole number", "a number", "a text"

# The arguments that decide what is computed, with the defaults that transformers publishes.
KINDS: dict[str, str] = {
    "per_device_train_batch_size": WHOLE,
    "gradient_accumulation_steps": WHOLE,
    "learning_rate": NUMBER,
    "weight_decay": NUMBER,
    "adam_beta1": NUMBER,
    "adam_beta2": NUMBER,
    "adam_epsilon": NUMBER,
    "max_grad_norm": NUMBER,
    "max_steps": WHOLE,
    "num_train_epochs": NUMBER,
    "lr_scheduler_type": TEXT,
    "lr_scheduler_kwargs": TEXT,
    "warmup_steps": NUMBER,
    "warmup_ratio": NUMBER,
    "fp16": BOOL,
    "bf16": BOOL,
    "fp16_full_eval": BOOL,
    "bf16_full_eval": BOOL,
    "tf32": BOOL,
    "gradient_checkpointing": BOOL,
    "optim": TEXT,
    "seed": WHOLE,
    "deepspeed": TEXT,
    "fsdp": TEXT,
    "fsdp_config": TEXT,
    "model_name_or_path": TEXT,
    "max_seq_length": WHOLE,
    "lora_rank": WHOLE,
    "lora_alpha": NUMBER,
    "target_modules": TEXT,
}
DEFAULTS: dict[str, object] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "max_steps": -1,
    "warmup_steps": 0,
    "fp16": False,
    "bf16": False,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
}
# The settings that say what an argument says, beside those of words/suggestions.py.
SETTINGS = {
    **dict.fromkeys(("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"), "precision"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), "scheduler.warmup_steps"),
    **{
        "lr_scheduler_kwargs": "scheduler.min_lr_ratio",
        "tf32": "precision.tf32",
        "gradient_checkpointing": "recompute",
    },
    **{"adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2", "adam_epsilon": "optimizer.eps"},
    **{"weight_decay": "optimizer.weight_decay", "lora_rank": "adapter.rank", "lora_alpha": "adapter.alpha"},
    "target_modules": "adapter.targets",
}
SAME = {  # names of other versions and of common training scripts
    "deepspeed_config": "deepspeed",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "activation_checkpointing": "gradient_checkpointing",
    "model_max_length": "max_seq_length",
    "max_length": "max_seq_length",
    "cutoff_len": "max_seq_length",
    "block_size": "max_seq_length",
    "lora_r": "lora_rank",
    **dict.fromkeys(("lora_target", "lora_target_modules"), "target_modules"),
}
# What changes the numbers and has no counterpart here, with the values that switch it off.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "label_smoothing_factor": (("0", "0.0"), "the loss is the plain cross entropy here"),
    "neftune_noise_alpha": (("none", "0"), "no noise is added to embeddings here"),
    "auto_find_batch_size": (
        ("false",),
        "the Trainer halves the batch when memory runs out, and so changes the numbers; give the batch that fits",
    ),
    "optim_target_modules": (("none",), "GaLore's projections are not here"),
    "lora_dropout": (("0", "0.0"), "adapters have no dropout here"),
    **dict.fromkeys(("use_dora", "use_rslora"), (("false",), "adapters are plain LoRA, times alpha / rank, here")),
    # TRL and LLaMA-Factory read TrainingArguments with other defaults.
    **dict.fromkeys(
        ("dataset_text_field", "packing", "completion_only_loss", "assistant_only_loss", "finetuning_type"),
        (
            (),
            "its tool has other defaults than TrainingArguments; give learning_rate, bf16, gradient_checkpointing and "
            "what else it sets",
        ),
    ),
}
IDLE = frozenset(
    [
        *("output_dir", "overwrite_output_dir", "optim_args", "average_tokens_across_devices"),
        *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "torch_compile"),
        *("torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache"),
        *("torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_first_step", "logging_dir"),
        *("log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level"),
        *("log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id"),
        *("eval_strategy", "evaluation_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size"),
        *("per_gpu_eval_batch_size", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches"),
        *("eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
        *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
        *("save_safetensors", "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo"),
        *("hub_model_id", "hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end"),
        *("metric_for_best_model", "greater_is_better", "ignore_data_skip"),
        *("restore_callback_states_from_checkpoint", "full_determinism", "data_seed", "use_cpu", "no_cuda"),
        *("use_mps_device", "accelerator_config", "parallelism_config", "dataloader_drop_last"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("remove_unused_columns", "label_names", "train_sampling_strategy", "group_by_length", "length_column_name"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ddp_backend", "ddp_timeout", "debug", "skip_memory_metrics", "do_train", "do_eval", "do_predict"),
        *("resume_from_checkpoint", "local_rank", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
        *("half_precision_backend", "fp16_opt_level", "fp16_backend", "include_inputs_for_metrics"),
        *("include_tokens_per_second", "torchdynamo", "jit_mode_eval", "fsdp_version"),
    ]
)
