"""DeepSpeed's `runtime.config`: a configuration that is read and checked without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_runtime.deepspeed.config import read_config
from zero_runtime.deepspeed.entry import own_device
from zero_runtime.errors import PlanError
from zero_runtime.world import is_joined, world_size

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
DeepSpeedConfigError = PlanError


class DeepSpeedConfig:
    """The numbers of a configuration, a dict or the path of a file, for the ranks of the process group (or for one).

    PlanError names all problems. `mpu` and `mesh_device` must be None.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path, mpu: None = None, mesh_device: None = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise PlanError("DeepSpeedConfig: expected no mpu and no mesh_device; leave them out")
        read = read_config(config, world_size() if is_joined() else 1, own_device().type)
        self._read = read
        self.train_batch_size = read.batch.train
        self.train_micro_batch_size_per_gpu = read.batch.micro
        self.gradient_accumulation_steps = read.batch.accumulation
        self.gradient_clipping = read.clip_norm or 0.0
        self.zero_optimization_stage = read.plan.stage
        self.zero_enabled = read.plan.stage > 0
        self.float16_enabled = self.fp16_enabled = read.precision.param == "fp16"
        self.bfloat16_enabled = read.precision.param == "bf16"

    def print(self, name: str) -> None:
        """Print all settings under this name, the keys that were given, and those without effect."""
        print(self._read.text(name))
