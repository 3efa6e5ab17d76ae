"""The report of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """The results of one step, the same on every rank.

    loss: the sum of the losses over ranks and micro-batches.
    grad_norm: the global norm before clipping, unscaled; inf or nan if the step overflowed.
    skipped: nothing was updated, because fp16 gradients overflowed.
    loss_scale: the loss scale of this step.
    stop: `RuntimeSettings.stop_asked` returned True on some rank; every rank gets it after the same step.
    """

    loss: float
    grad_norm: float
    skipped: bool = False
    loss_scale: float = 1.0
    stop: bool = False
