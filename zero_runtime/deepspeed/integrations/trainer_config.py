"""The engine's configuration from TrainingArguments: "auto" is filled, what is missing added, what differs refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zero_runtime.deepspeed.auto import AutoValues, auto_values, mismatches, with_values
from zero_runtime.deepspeed.config import NODE_LOCAL
from zero_runtime.deepspeed.json_text import load
from zero_runtime.deepspeed.schema import AUTO
from zero_runtime.errors import PlanError

# Keys that every configuration has here.
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
    warmup_steps = None if total_steps is None else args.get_warmup_steps(total_steps)
    values = replace(AutoValues.of(args, model), warmup_steps=warmup_steps, total_steps=total_steps)
    asked = dict(given)
    for name in _ALWAYS:
        asked.setdefault(name, AUTO)
    if args.save_on_each_node:
        asked["checkpoint"] = {**asked.get("checkpoint", {}), NODE_LOCAL: True}
    for name in ("fp16", "bf16"):
        if getattr(args, name):
            asked.setdefault(name, {"enabled": AUTO})
    if wrong := mismatches(asked, values):  # which of the two is meant cannot be known
        raise PlanError(
            f"deepspeed: expected the values of TrainingArguments, found others: {'; '.join(wrong)}; write "
            '"auto" in the configuration, or the same value in both'
        )
    return _without_rest(with_values(asked, auto_values(asked, values)))


def _without_rest(config: dict[str, Any]) -> dict[str, Any]:
    """Leaves out an "auto" that needs no value: the batch of all ranks follows from the other sizes, and what is left
    "auto" in zero_optimization has no effect here."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        config["zero_optimization"] = {key: value for key, value in zero.items() if value != AUTO}
    return {key: value for key, value in config.items() if (key, value) != ("train_batch_size", AUTO)}
