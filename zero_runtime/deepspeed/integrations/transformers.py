"""transformers with the engine: Trainer, TrainingArguments, HfDeepSpeedConfig and from_pretrained.

A script for transformers and DeepSpeed imports these names from here and is not changed otherwise. Importing this file
imports transformers and, for the Trainer, accelerate; the rest of the runtime needs neither. See docs/transformers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from zero_runtime.deepspeed.integrations.arguments import ZeroArguments
from zero_runtime.deepspeed.integrations.memory_usage import MemoryUsageCallback
from zero_runtime.deepspeed.integrations.pretrained import from_pretrained
from zero_runtime.deepspeed.integrations.trainer import ZeroTrainer
from zero_runtime.deepspeed.json_text import load

__all__ = [
    "HfDeepSpeedConfig",
    "MemoryUsageCallback",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "ZeroArguments",
    "ZeroTrainer",
    "from_pretrained",
]

if not hasattr(transformers.Trainer, "_prepare_for_training"):
    raise ImportError(
        f"zero_runtime.integrations.transformers: expected a transformers whose Trainer has _prepare_for_training "
        f"(5.23 does), found {transformers.__version__}; install a newer one"
    )


class TrainingArguments(ZeroArguments, transformers.TrainingArguments):
    """transformers.TrainingArguments; `deepspeed=` takes a configuration for zero_runtime."""


class Trainer(ZeroTrainer, transformers.Trainer):
    """transformers.Trainer, which trains with zero_runtime if its arguments have `deepspeed=`."""


class Seq2SeqTrainingArguments(ZeroArguments, transformers.Seq2SeqTrainingArguments):
    """transformers.Seq2SeqTrainingArguments, as TrainingArguments here."""


class Seq2SeqTrainer(ZeroTrainer, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer, as Trainer here."""


class HfDeepSpeedConfig:
    """The counterpart of transformers' class: holds a configuration, and answers questions about it.

    In transformers its existence makes from_pretrained shard a model of its own; here the function from_pretrained of
    this module does that, and a model that transformers loaded in full is sharded by initialize.
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | Path) -> None:
        self.config = load(config_file_or_dict)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value at a path such as "zero_optimization.offload_param.device"."""
        place: Any = self.config
        for name in ds_key_long.split("."):
            if not isinstance(place, Mapping) or name not in place:
                return default
            place = place[name]
        return place

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are offloaded."""
        devices = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        return any(device in ("cpu", "nvme") for device in devices)
