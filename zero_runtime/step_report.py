"""What one step of training reports to its caller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """What one step tells.

    loss: the sum over ranks and micro-batches of the losses. grad_norm: before clipping, unscaled; inf or nan in a
    step that overflowed. skipped: nothing was updated, because fp16 gradients overflowed. loss_scale: used here.
    stop: some rank's `RuntimeSettings.stop_asked` said so; every rank is told after the same step.
    """

    loss: float
    grad_norm: float
    skipped: bool = False
    loss_scale: float = 1.0
    stop: bool = False
