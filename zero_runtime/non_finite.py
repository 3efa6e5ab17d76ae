"""Diagnosis of a loss or gradient that is not finite: the ranks, the parameters and possible remedies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from zero_runtime.optim.loss_scaler import LossScaler
from zero_runtime.precision import MixedPrecision
from zero_runtime.step_report import StepReport
from zero_runtime.unit import Unit

FP16_MAX = 65504.0


@dataclass(frozen=True)
class NonFiniteReport:
    """One rank's local, unreduced numbers of the failed step."""

    loss: float
    first_bad_grad: str | None
    first_bad_param: str | None
    largest_param: float


def non_finite_message(report: StepReport, updates: int, scaler: LossScaler) -> str:
    """The first line of the diagnosis, from numbers that every rank has without a further run."""
    told = f"step {updates + 1}: loss {report.loss} and gradient norm {report.grad_norm}, expected finite numbers"
    if scaler.rule.static != 1 and not math.isfinite(report.loss):
        told += f"; the loss is so before it is multiplied by the loss scale, {scaler.scale:g}: no other scale helps"
    elif scaler.rule.static is None:
        told += f"; the loss scale is {scaler.scale:g}, at its minimum, and cannot fall further"
    elif scaler.rule.static != 1:
        told += f"; the loss scale is fixed at {scaler.scale:g}"
    return told + "; nothing was updated"


def look(units: list[Unit], loss: float) -> NonFiniteReport:
    """This rank's report. Expects the unreduced gradients of the failed step and inspects them in backward order."""
    bad_grad = None
    for unit in reversed(units):
        bad_grad = bad_grad or unit.gradients.first_non_finite()
    bad_param, largest = None, 0.0
    for unit in units:
        shard = unit.weights_shard
        largest = max(largest, float(torch.nan_to_num(shard.abs(), nan=0.0).max()) if shard.numel() else 0.0)
        if bad_param is None and not bool(torch.isfinite(shard).all()):
            bad_param = unit.name
    return NonFiniteReport(loss, bad_grad, bad_param, largest)


def verdict(findings: list[NonFiniteReport], precision: MixedPrecision) -> str:
    """The diagnosis as text: affected ranks, their first bad parameters, weights beyond fp16's range, and remedies."""
    lines = []
    for rank, found in enumerate(findings):
        if not math.isfinite(found.loss):
            lines.append(f"rank {rank}: its own loss is {found.loss}")
        if found.first_bad_param is not None:
            lines.append(f"rank {rank}: weights of unit {found.first_bad_param} are not finite themselves")
        if found.first_bad_grad is not None:
            lines.append(
                f"rank {rank}: first parameter in backward with a gradient that is not finite: {found.first_bad_grad}"
            )
    if not lines:
        lines.append(
            "every rank's own loss and gradients are finite: the sum over ranks overflowed; use precision.reduce=fp32"
        )
    largest = max(found.largest_param for found in findings)
    fp16 = "fp16" in (precision.param, precision.compute)
    if fp16 and largest > FP16_MAX:
        lines.append(f"the largest weight, {largest:g}, is beyond fp16's {FP16_MAX:g}: this model has bf16's range")
    lines.append(
        "try: " + ("precision=bf16, or precision=fp32" if fp16 else "precision=fp32") + ", a lower optimizer.lr, "
        "optimizer.clip_norm=1, and the batch of this step for bad input"
    )
    return "\n".join(lines)
