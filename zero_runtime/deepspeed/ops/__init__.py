"""DeepSpeed's `ops`: optimizers by its names. The runtime has kernels of its own (kernels/)."""

from __future__ import annotations

from types import ModuleType

from zero_runtime.deepspeed.absent import ABSENT_OF_OPS, submodule

MODULES = ("adagrad", "adam", "lamb", "lion")


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name, MODULES, ABSENT_OF_OPS)
