"""DeepSpeed's `runtime`: the modules that scripts import by their path."""

from __future__ import annotations

from types import ModuleType

from zero_runtime.deepspeed.absent import ABSENT_OF_RUNTIME, submodule

_MODULES = ("config", "dataloader", "engine", "lr_schedules", "utils", "zero")


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name, _MODULES, ABSENT_OF_RUNTIME)
