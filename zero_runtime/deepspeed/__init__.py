"""DeepSpeed's entry points, names and modules on top of the runtime, see docs/dropin.md and docs/transformers.md.

`import zero_runtime as deepspeed` and `import zero_runtime.deepspeed as deepspeed` have the same names. Under the
second, modules have DeepSpeed's paths too: `from zero_runtime.deepspeed.runtime.lr_schedules import WarmupLR`.
Imports are lazy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import zero_runtime
from zero_runtime.deepspeed import absent

_MODULES = ("accelerator", "checkpoint", "checkpointing", "comm", "ops", "runtime", "utils", "zero")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in absent.ABSENT:
        raise absent.missing(__name__, name)
    return getattr(zero_runtime, name)
