"""Tensor and sequence parallelism as a configuration asks for them: settings of the runtime, and what a rank holds."""

from __future__ import annotations

from typing import Any

from torch import nn

from orchestrator.config.schema import RunConfig
from zero_runtime.parallel.sequence.attention import check_model
from zero_runtime.parallel.sequence.division import SequenceParallel
from zero_runtime.parallel.tensor.division import TensorParallel
from zero_runtime.slices import WHOLE, Slices


def tensor_parallel(config: RunConfig) -> TensorParallel:
    """The runtime's settings: each rank keeps its own logits, for the loss by the vocabulary."""
    return TensorParallel(config.parallel.tp, tuple(config.parallel.patterns), gathers_logits=False)


def divisions_of(config: RunConfig) -> dict[str, Any]:
    """The runtime's settings of both divisions, by name."""
    return {"tensor_parallel": tensor_parallel(config), "sequence_parallel": SequenceParallel(config.parallel.sp)}


def slices_of(config: RunConfig, model: nn.Module) -> Slices:
    """What the first rank of a group holds of a full model.

    PlanError, with degrees that do, if tp does not divide its layers, or sp not its sequences or heads.
    """
    if config.parallel.sp > 1:
        check_model(model, config.parallel.sp)
    return WHOLE if config.parallel.tp == 1 else tensor_parallel(config).plan(model).slices(0)
