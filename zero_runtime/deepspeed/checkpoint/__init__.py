"""DeepSpeed's `checkpoint`: the helper that accelerate imports."""

from __future__ import annotations

from types import ModuleType

from zero_runtime.deepspeed.absent import submodule


def __getattr__(name: str) -> ModuleType:
    return submodule(__name__, name, ("utils",), {})
