"""DeepSpeed's FusedLamb, an optimizer to give to `initialize`."""

from __future__ import annotations

from zero_runtime.deepspeed.named_optimizer import NamedOptimizer

__all__ = ["FusedLamb"]


class FusedLamb(NamedOptimizer):
    """LAMB with the constants of the configuration's optimizer `Lamb`."""

    section = "Lamb"
