"""DeepSpeed's `ops`: optimizers by its names. The runtime has kernels of its own (kernels/)."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from zero_runtime.deepspeed.absent import ABSENT_OF_OPS, missing


def __getattr__(name: str) -> ModuleType:
    if name == "adam":
        return import_module("zero_runtime.ops.adam")
    raise missing("zero_runtime.ops", name, ABSENT_OF_OPS)
