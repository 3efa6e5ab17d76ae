"""Writes a point for Accelerate's launcher and for transformers' Trainer, next to its configuration of DeepSpeed."""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml

from orchestrator.config.schema import RunConfig
from orchestrator.wings.foreign import loop_lines
from orchestrator.wings.foreign.findings import as_word
from zero_runtime.optim.configs import AdamConfig, AdamWConfig, LambConfig, OneBitAdamConfig
from zero_runtime.optim.lr_settings import (
    ConstantSettings,
    CosineSettings,
    WarmupDecaySettings,
    WarmupSettings,
)

JSON_FILE, YAML_FILE, LINES_FILE = "ds_config.json", "accelerate.yaml", "loop_parts.py"
_USE = """Parts of a training loop next to {json}, for what DeepSpeed has no keys for:

    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), config="{json}"{scheduler}
    )

Needs torch alone."""


def lines_file(config: RunConfig, deepspeed: dict[str, Any], why: str) -> str:
    """Parameter groups, and the schedule if the configuration has none."""
    own = "scheduler" not in deepspeed
    scheduler = ",\n        lr_scheduler=schedule" if own else ""
    use = _USE.format(json=JSON_FILE, scheduler=scheduler)
    lines = [loop_lines.parameter_groups(config), *([loop_lines.rates(config)] if own else [])]
    return "\n".join([loop_lines.heading(why, (), use), loop_lines.needed(config, steps=False), *lines])


def accelerate_file(config: RunConfig) -> str:
    """Accelerate's file, which names the configuration of DeepSpeed; Accelerate refuses keys that both have."""
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": JSON_FILE, "zero3_init_flag": config.zero.stage == 3},
        "num_machines": config.resources.nodes,
        "num_processes": config.resources.ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    return yaml.safe_dump(content, sort_keys=False)


def launched_problems(config: RunConfig) -> list[str]:
    """Why Accelerate, and so the Trainer, cannot run this point from the written files, one line each."""
    if config.parallel.sp == 1:
        return []
    return ["parallel.sp: Accelerate has a section of its own, which is not written      fix: --to deepspeed"]


def trainer_problems(config: RunConfig) -> list[str]:
    """Why the Trainer cannot run this point by arguments alone, one line each."""
    rule, found = config.optimizer.rule, []
    if not isinstance(rule, AdamWConfig) or isinstance(rule, (AdamConfig, LambConfig, OneBitAdamConfig)):
        found.append(
            f"optimizer={rule.kind}: the Trainer's arguments say AdamW      fix: --to deepspeed, or optimizer=adamw"
        )
    known = (ConstantSettings, CosineSettings, WarmupSettings)
    if not isinstance(config.scheduler.curve, known):
        found.append(f"scheduler={config.scheduler.curve.kind}: the Trainer has none      fix: --to deepspeed")
    return found


def trainer_notes(config: RunConfig) -> list[str]:
    """What the Trainer does differently, one sentence each."""
    notes = ["the Trainer's rise starts at rate 0 and is one update ahead or behind ours: see lr_scheduler_type"]
    return notes if not isinstance(config.scheduler.curve, ConstantSettings) else []


def trainer_arguments(config: RunConfig) -> list[str]:
    """The arguments of the Trainer, as words of a command line."""
    rule = config.optimizer.rule
    assert isinstance(rule, AdamWConfig)
    batch = config.batch
    found: dict[str, Any] = {
        "deepspeed": JSON_FILE,
        "per_device_train_batch_size": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "learning_rate": config.optimizer.lr,
        "weight_decay": rule.weight_decay,
        "adam_beta1": rule.beta1,
        "adam_beta2": rule.beta2,
        "adam_epsilon": rule.eps,
        "max_grad_norm": config.optimizer.clip_norm or 0.0,
        "max_steps": config.steps(),
        "seed": config.seed,
        **_schedule(config),
    }
    words = [f"--{name}={as_word(value)}" for name, value in found.items()]
    words += [f"--{name}" for name in ("bf16", "fp16") if config.precision.dtypes.param == name]
    return words + (["--tf32=true"] if config.precision.tf32 else [])


def trainer_deepspeed(deepspeed: dict[str, Any]) -> dict[str, Any]:
    """The configuration for the Trainer, which fills in what its arguments say.

    Without a section optimizer and scheduler the Trainer makes them, and leaves norms and biases out of weight decay.
    """
    left = ("optimizer", "scheduler", "zero_allow_untested_optimizer")
    found = {key: value for key, value in copy.deepcopy(deepspeed).items() if key not in left}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    found |= dict.fromkeys(sizes, "auto")
    for name in ("bf16", "fp16"):
        if name in found:
            found[name]["enabled"] = "auto"
    return found


def _schedule(config: RunConfig) -> dict[str, Any]:
    curve = config.scheduler.curve
    if isinstance(curve, CosineSettings):
        ratio = {"lr_scheduler_kwargs": json.dumps({"min_lr_rate": curve.min_lr_ratio})}
        kind = "cosine_with_min_lr" if curve.min_lr_ratio else "cosine"
        return {"lr_scheduler_type": kind, "warmup_steps": curve.warmup_steps, **(ratio if curve.min_lr_ratio else {})}
    if isinstance(curve, WarmupSettings):
        kind = "linear" if isinstance(curve, WarmupDecaySettings) else "constant_with_warmup"
        return {"lr_scheduler_type": kind, "warmup_steps": curve.warmup_steps}
    return {"lr_scheduler_type": "constant"}
