"""Fills the values "auto" of a DeepSpeed configuration from the arguments of a trainer. Standard library only."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AUTO = "auto"


@dataclass(frozen=True)
class AutoValues:
    """What "auto" stands for. None: unknown, so that an "auto" that asks for it stays and is refused.

    micro_batch: samples per micro-batch on one rank. total_steps: optimizer steps of the run. hidden_size: that of the
    model; only keys without effect here are computed from it.
    """

    micro_batch: int | None = None
    accumulation: int | None = None
    max_grad_norm: float | None = None
    learning_rate: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    hidden_size: int | None = None


def fill_auto(config: Mapping[str, Any], values: AutoValues) -> dict[str, Any]:
    """A copy of `config` in which every "auto" with a known value has that value.

    "auto" as train_batch_size and in zero_optimization is left out: the first follows from the other sizes and the
    number of ranks, and the keys of the section that trainers fill have no effect here.
    """
    filled = {key: copy.deepcopy(value) for key, value in config.items() if (key, value) != ("train_batch_size", AUTO)}
    zero = filled.get("zero_optimization")
    if isinstance(zero, dict):
        filled["zero_optimization"] = {key: value for key, value in zero.items() if value != AUTO}
    for path, value in known_values(values).items():
        *sections, key = path.split(".")
        place: Any = filled
        for name in sections:
            place = place.get(name) if isinstance(place, Mapping) else None
        if isinstance(place, dict) and place.get(key) == AUTO and value is not None:
            place[key] = value
    return filled


def known_values(values: AutoValues) -> dict[str, Any]:
    """The values by the path of their key. Learning rate and warm-up follow the trainers: the warm-up starts at 0."""
    return {
        "train_micro_batch_size_per_gpu": values.micro_batch,
        "gradient_accumulation_steps": values.accumulation,
        "gradient_clipping": values.max_grad_norm,
        "optimizer.params.lr": values.learning_rate,
        "optimizer.params.betas": None if values.betas is None else list(values.betas),
        "optimizer.params.eps": values.eps,
        "optimizer.params.weight_decay": values.weight_decay,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": values.learning_rate,
        "scheduler.params.warmup_num_steps": values.warmup_steps,
        "scheduler.params.total_num_steps": values.total_steps,
        "fp16.enabled": values.fp16,
        "bf16.enabled": values.bf16,
    }
