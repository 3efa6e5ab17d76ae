"""Functions of DeepSpeed's `zero` on models and modules that have less to do here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zero_runtime.deepspeed.engine import Engine
from zero_runtime.errors import PlanError


@contextmanager
def unwrap_model_for_generation(model: Engine) -> Iterator[Engine]:
    """Context without gradients in which each rank may call the engine, its module and `generate` as it needs.

    Every rank enters it. Weights are gathered by each call, not once for all; parameters are not readable inside.
    """
    if not isinstance(model, Engine):
        raise PlanError(f"unwrap_model_for_generation: expected the engine, found a {type(model).__name__}")
    with model.runtime.uneven_forwards():
        yield model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: parameters that another module reads are gathered by themselves."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, see register_external_parameter."""
