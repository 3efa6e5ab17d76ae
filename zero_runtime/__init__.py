"""zero_runtime: ZeRO stages 0 to 3 over torch.distributed, as one table of lifetimes.

Lazy: naming a thing imports its module, so that the pure parts (plan, layout, memory model) come without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "AdamWConfig": "sharded_optimizer",
    "LrSchedule": "lr_schedule",
    "MixedPrecision": "precision",
    "RuntimeSettings": "runtime",
    "StepReport": "runtime",
    "ZeroPlan": "plan",
    "ZeroRuntime": "runtime",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zero_runtime' has no attribute {name!r}")
    return getattr(import_module(f"zero_runtime.{_HOME[name]}"), name)
