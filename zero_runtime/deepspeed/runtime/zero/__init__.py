"""DeepSpeed's `runtime.zero` and the modules in it: other names of zero_runtime.zero."""

from __future__ import annotations

import sys
from typing import Any

from zero_runtime.deepspeed import zero

for _name in ("partition_parameters", "stage3", "stage_1_and_2"):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = zero


def __getattr__(name: str) -> Any:
    return getattr(zero, name)
