"""DeepSpeed's `runtime.zero`: the names of zero_runtime.zero."""

from __future__ import annotations

from typing import Any

from zero_runtime.deepspeed import zero


def __getattr__(name: str) -> Any:
    return getattr(zero, name)
