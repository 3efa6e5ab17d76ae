"""The engine's configuration from TrainingArguments: "auto" is filled, what is missing added, what differs refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from zero_runtime.deepspeed.auto import AUTO, AutoValues, fill_auto, known_values
from zero_runtime.deepspeed.json_text import load
from zero_runtime.errors import PlanError

# Keys that TrainingArguments decides, with the arguments that they come from.
_SHARED = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps, or the epochs",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
_ALWAYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_REFUSED = {
    "fsdp": "FSDP shards too; leave one of both out",
    "auto_find_batch_size": "the engine's sizes are fixed; `zlab fit` finds the largest batch before a run",
    "fp16_full_eval": "the engine decides the dtype; set fp16.enabled in the configuration",
    "bf16_full_eval": "the engine decides the dtype; set bf16.enabled in the configuration",
    "torch_compile": "the runtime's hooks are not compiled",
}


def as_mapping(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The configuration of TrainingArguments(deepspeed=...): a dict, a path, or JSON typed on a command line."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        try:
            source = json.loads(source)
        except ValueError as error:
            raise PlanError(f"deepspeed: expected a dict, a file or JSON, found JSON with an error: {error}") from error
    return load(source)


def engine_config(given: Mapping[str, Any], args: Any, model: nn.Module, total_steps: int | None) -> dict[str, Any]:
    """`given` with every value of TrainingArguments; one PlanError names all values that contradict them.

    total_steps: optimizer steps of the run; None if they do not matter, because the schedule is not used.
    """
    wrong = [f"{name}: {why}" for name, why in _REFUSED.items() if getattr(args, name, None)]
    if wrong:
        raise PlanError("TrainingArguments, with deepspeed=: " + "; ".join(wrong))
    values = AutoValues(
        micro_batch=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        max_grad_norm=args.max_grad_norm,
        learning_rate=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        warmup_steps=None if total_steps is None else args.get_warmup_steps(total_steps),
        total_steps=total_steps,
        fp16=bool(args.fp16),
        bf16=bool(args.bf16),
        hidden_size=getattr(getattr(model, "config", None), "hidden_size", None),
    )
    asked = dict(given)
    for name in _ALWAYS:
        asked.setdefault(name, AUTO)
    for name in ("fp16", "bf16"):
        if getattr(args, name):
            asked.setdefault(name, {"enabled": AUTO})
    filled = fill_auto(asked, values)
    _check(filled, known_values(values))
    return filled


def _check(config: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse values that contradict those of TrainingArguments: which of them is meant cannot be known."""
    problems = []
    for path, argument in _SHARED.items():
        place: Any = config
        for name in path.split("."):
            place = place.get(name) if isinstance(place, Mapping) else None
        wanted = known[path]
        if wanted is not None and place not in (None, AUTO) and place != wanted:
            problems.append(f"{path} is {place!r}, {argument} of TrainingArguments {wanted!r}")
    if problems:
        raise PlanError(
            f"deepspeed: expected the values of TrainingArguments, found others: {'; '.join(problems)}; write "
            '"auto" in the configuration, or the same value in both'
        )
