"""How other tools name what they train with: tables of their names, words and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LAUNCH = "launch:"  # before a flag of `accelerate launch`, which says how the model is divided
_OFF = ("false", "0", "0.0", "none")
_ONE = ("1", "-1")
_SHARDS = ("-1", *map(str, range(2, 1 << 14)))
_LOSS = "the loss is the plain cross entropy here"
_BASE = "the base model is not quantised here"
_SOME = "all parameters, or an adapter, are trained here"
_PLAIN = "adapters are plain LoRA here"
_RING = "ring attention is not here; parallel.sp=N after it divides sequences by heads"
_TP = "parallel.tp=N after it says the same"


class Dialect(NamedTuple):
    """The names of one tool.

    marks: one of these keys shows that a file or a line is this tool's. same: our name for its name. values: our word
    for its word, by its name. usual: its defaults where they differ from those of TrainingArguments. needs: arguments
    of which one must be given, because the default depends on the version or on the script. refused: the values that
    switch a key off, and why others are refused. sections: prefixes of keys without effect. rise: what differs in its
    schedules, where they are not those of transformers.
    """

    name: str
    marks: frozenset[str] = frozenset()
    same: Mapping[str, str] = {}
    values: Mapping[str, Mapping[str, str]] = {}
    usual: Mapping[str, Any] = {}
    needs: tuple[tuple[str, ...], ...] = ()
    refused: Mapping[str, tuple[tuple[str, ...], str]] = {}
    sections: tuple[str, ...] = ()
    rise: str | None = None


def _refused(*rows: tuple[str, tuple[str, ...], str]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Rows of names, the values that are accepted, and why others are not."""
    return {name: (accepted, reason) for names, accepted, reason in rows for name in names.split()}


def _names(text: str) -> dict[str, str]:
    """Our name for each name; a + stands between the names of several values."""
    return dict(word.split("=") for word in text.split())


TRAINER = Dialect("TrainingArguments", frozenset(["per_device_train_batch_size", "num_train_epochs"]))
_OPENRLHF = Dialect(
    "OpenRLHF",
    frozenset(["micro_train_batch_size", "openrlhf.cli.train_sft"]),
    same=_names(
        "zero_stage=launch:zero_stage adam_offload=launch:offload_optimizer_device bf16=launch:mixed_precision "
        "param_dtype=launch:mixed_precision micro_train_batch_size=per_device_train_batch_size "
        "max_norm=max_grad_norm l2=weight_decay adam_betas=adam_beta1+adam_beta2 lr_scheduler=lr_scheduler_type "
        "lr_warmup_ratio=warmup_ratio max_len=max_seq_length max_epochs=num_train_epochs "
        "pretrain=model_name_or_path"
    ),
    values={"adam_offload": {"true": "cpu"}, "bf16": {"true": "bf16"}},
    usual={
        f"{LAUNCH}use_deepspeed": "true",
        f"{LAUNCH}zero_stage": "2",
        "train_batch_size": 128,
        "learning_rate": 5e-6,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
        "warmup_ratio": 0.03,
        "seed": 42,
    },
    needs=(("bf16", "param_dtype"),),
    refused=_refused(
        ("beta ref_pretrain reward_pretrain critic_pretrain aux_loss_coef", _OFF, _LOSS),
        ("load_in_4bit", _OFF, _BASE),
        ("lora_rank", _OFF, "its layers depend on the version; adapter=lora after it adds one"),
        ("zpg", _ONE, "zero.shard_ranks=N and zero.outer_sharding=none after it say the same"),
        ("ds_tensor_parallel_size", _ONE, _TP),
        ("ring_attn_size", _ONE, _RING),
        ("grad_accum_dtype", ("fp32", "none"), "precision.accumulate=bf16 after it says the same"),
    ),
)
_TORCHTITAN = Dialect(
    "torchtitan",
    frozenset(["training.local_batch_size", "parallelism.data_parallel_shard_degree", "training.seq_len"]),
    same=_names(
        "training.local_batch_size=per_device_train_batch_size training.batch_size=per_device_train_batch_size "
        "training.global_batch_size=train_batch_size training.seq_len=max_seq_length "
        "training.max_norm=max_grad_norm training.steps=max_steps training.seed=seed debug.seed=seed "
        "training.mixed_precision_param=launch:mixed_precision "
        "training.mixed_precision_reduce=launch:fsdp_reduce_dtype "
        "training.enable_cpu_offload=launch:fsdp_offload_params "
        "parallelism.fsdp_reshard_after_forward=launch:fsdp_reshard_after_forward "
        "parallelism.data_parallel_shard_degree=launch:parallelism_config_dp_shard_size "
        "parallelism.data_parallel_replicate_degree=launch:parallelism_config_dp_replicate_size "
        "parallelism.tensor_parallel_degree=launch:parallelism_config_tp_size "
        "parallelism.context_parallel_degree=launch:parallelism_config_cp_size optimizer.name=optim "
        "optimizer.lr=learning_rate optimizer.beta1=adam_beta1 optimizer.beta2=adam_beta2 "
        "optimizer.eps=adam_epsilon optimizer.weight_decay=weight_decay lr_scheduler.warmup_steps=warmup_steps "
        "lr_scheduler.decay_type=lr_scheduler_type activation_checkpoint.mode=recompute"
    ),
    values={
        "training.mixed_precision_param": {"bfloat16": "bf16", "float32": "no"},
        "training.mixed_precision_reduce": {"float32": "fp32", "bfloat16": "bf16"},
        "training.global_batch_size": {"-1": ""},
        "parallelism.fsdp_reshard_after_forward": {"default": "true", "always": "true", "never": "false"},
        "optimizer.name": {"AdamW": "adamw_torch"},
        "activation_checkpoint.mode": {"selective": "by_operation"},
    },
    usual={
        f"{LAUNCH}use_fsdp": "true",
        f"{LAUNCH}fsdp_version": "2",
        f"{LAUNCH}mixed_precision": "bf16",
        f"{LAUNCH}fsdp_reduce_dtype": "fp32",
        "learning_rate": 8e-4,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "no_decay": False,
        "warmup_steps": 200,
        "recompute": "by_operation",
        "max_seq_length": 2048,
        "max_steps": 10000,
    },
    refused=_refused(
        ("parallelism.pipeline_parallel_degree parallelism.expert_parallel_degree", _ONE, "it is not here"),
        ("parallelism.data_parallel_shard_degree", _SHARDS, "DDP is --args '--multi_gpu --num_processes N'"),
        ("lr_scheduler.decay_ratio", _OFF, "the rate decays from the warm-up on; scheduler=... after it says another"),
        ("lr_scheduler.lr_min lr_scheduler.min_lr_factor", _OFF, "scheduler.min_lr_ratio=... after it says the same"),
        ("model.converters", _OFF, "float8 is not here"),
        ("training.dtype", ("float32",), "parameters are kept in fp32; precision=bf16_pure after it keeps bf16"),
    ),
    sections=("job.", "profiling.", "metrics.", "checkpoint.", "comm.", "compile.", "float8.", "validation.", "debug."),
    rise="torchtitan's rise may be one update ahead of ours",
)
_LLAMA_FACTORY = Dialect(
    "LLaMA-Factory",
    frozenset(["finetuning_type", "cutoff_len"]),
    same=_names(
        "finetuning_type=use_peft lora_rank=lora_r lora_target=lora_target_modules "
        "disable_gradient_checkpointing=gradient_checkpointing"
    ),
    values={
        "finetuning_type": {"lora": "true", "full": "false"},
        "lora_target": {"all": "all-linear"},
        "disable_gradient_checkpointing": {"true": "false", "false": "true"},
    },
    usual={
        "use_peft": True,
        "lora_r": 8,
        "lora_target_modules": "all-linear",
        "gradient_checkpointing": True,
        "max_seq_length": 2048,
    },
    refused=_refused(
        ("stage", ("sft", "pt"), _LOSS),
        ("finetuning_type", ("lora", "full"), _SOME),
        ("additional_target", _OFF, _SOME),
        ("quantization_bit", _OFF, _BASE),
        ("pure_bf16", _OFF, "precision=bf16_pure after it says the same"),
        ("use_galore use_apollo use_badam use_adam_mini use_muon", _OFF, "it is not here"),
        ("use_dora pissa_init loraplus_lr_ratio", _OFF, _PLAIN),
    ),
)
_AXOLOTL = Dialect(
    "axolotl",
    frozenset(["base_model", "sequence_len", "dataset_prepared_path"]),
    same=_names(
        "base_model=model_name_or_path micro_batch_size=per_device_train_batch_size num_epochs=num_train_epochs "
        "sequence_len=max_seq_length optimizer=optim lr_scheduler=lr_scheduler_type "
        "gradient_clipping=max_grad_norm adapter=use_peft lora_target_linear=lora_target_modules"
    ),
    values={
        "bf16": {"auto": "true"},
        "adapter": {"lora": "true"},
        "lora_target_linear": {"true": "all-linear", "false": ""},
    },
    usual={
        "per_device_train_batch_size": 1,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03,
    },
    needs=(("learning_rate",), ("bf16", "fp16", "bfloat16", "float16")),
    refused=_refused(
        ("rl reward_model", _OFF, _LOSS),
        ("adapter", ("lora", *_OFF), _BASE),
        ("load_in_4bit load_in_8bit", _OFF, _BASE),
        ("bfloat16 float16 fp8", _OFF, "bf16: true is here, and precision=bf16_pure after the file"),
        ("lora_modules_to_save unfrozen_parameters", _OFF, _SOME),
        ("peft_use_dora loraplus_lr_ratio relora", _OFF, _PLAIN),
        ("batch_size", _OFF, "gradient_accumulation_steps says the same"),
        ("cosine_min_lr_ratio", _OFF, "scheduler.min_lr_ratio=... after the file says the same"),
        ("dp_shard_size", _ONE, "zero.shard_ranks=N after the file says the same"),
        ("tensor_parallel_size", _ONE, _TP),
        ("context_parallel_size sequence_parallel_degree", _ONE, _RING),
    ),
)
_TRL = Dialect(
    "TRL",
    frozenset(["trl", "use_peft", "packing", "dataset_text_field", "completion_only_loss", "assistant_only_loss"]),
    usual={
        "learning_rate": 2e-5,
        "bf16": True,
        "gradient_checkpointing": True,
        "max_seq_length": 1024,
        "lora_r": 16,
        "lora_alpha": 32.0,
    },
    refused=_refused(
        ("beta num_generations max_prompt_length max_completion_length reward_funcs", _OFF, _LOSS),
        ("loss_type", ("nll", "chunked_nll"), _LOSS),
        ("load_in_4bit load_in_8bit", _OFF, _BASE),
        ("use_dora", _OFF, _PLAIN),
    ),
)
DIALECTS = (_OPENRLHF, _TORCHTITAN, _LLAMA_FACTORY, _AXOLOTL, _TRL, TRAINER)


def dialect_of(keys: Iterable[str]) -> Dialect | None:
    """The tool that has one of these keys, or a script of this name; None if none has."""
    found = set(keys)
    return next((one for one in DIALECTS if found & one.marks), None)
