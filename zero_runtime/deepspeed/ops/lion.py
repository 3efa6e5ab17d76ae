"""DeepSpeed's FusedLion and DeepSpeedCPULion, optimizers to give to `initialize`."""

from __future__ import annotations

from zero_runtime.deepspeed.named_optimizer import NamedOptimizer

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(NamedOptimizer):
    """Lion with the constants of the configuration's optimizer `Lion`."""

    section = "Lion"


class DeepSpeedCPULion(FusedLion):
    """The same, by DeepSpeed's name for offloaded states; offload is in the configuration."""
