"""Traces of published runs that compute something in another way than transformers' models and this project do.

Norms may be one kernel each. With tensor parallelism the head may gather the logits of all ranks, whose loss each rank
then computes over the full vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from orchestrator.config.schema import RunConfig
from orchestrator.wings.predict import activations, memory_cache, step
from zero_runtime.parallel.tensor.layers import HeadForward

MICROS = (1, 2, 512)  # traced, so that all between are known: more than any published run has


class Kernels(NamedTuple):
    """Kernels of a published run that differ from ours: RMSNorm as one kernel, the loss of the gathered logits."""

    fuses_norms: bool = False
    gathers_logits: bool = False


def answers(config: RunConfig, kernels: Kernels) -> dict[str, Any]:
    """Count the configuration with these kernels at every micro-batch up to the largest, like memory_cache.answers."""
    found = memory_cache.answers([config], [])
    name = "fused-norms-" * kernels.fuses_norms + "gathered-logits-" * kernels.gathers_logits
    key = name + memory_cache.activations_key(config, any_micro=True)
    return found | memory_cache.recalled(key, functools.partial(_counted, config, kernels))


def _counted(config: RunConfig, kernels: Kernels) -> dict[str, Any]:
    build = _build if kernels.fuses_norms else _build_deferred
    divide = _divide_and_gather if kernels.gathers_logits else _divide
    with mock.patch.object(activations, "build_deferred", build), mock.patch.object(activations, "divide", divide):
        return dict(activations.answers([step.with_micro(config, micro) for micro in MICROS]))


def _divide_and_gather(config: RunConfig, model: nn.Module) -> HeadForward | None:
    """Let the head return all logits, so that there is no divided head to compute the loss."""
    head = _divide(config, model)
    if head is not None:
        head.gathers = True
    return None


def _build(config: RunConfig) -> tuple[nn.Module, Any]:
    model, rest = _build_deferred(config)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_one_kernel, module)
    return model, rest


_build_deferred, _divide = activations.build_deferred, activations.divide


def _one_kernel(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """LayerNorm has the operations, bytes and kept tensors of a fused RMSNorm, but for one number of each row."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return F.layer_norm(hidden, weight.shape, weight)
