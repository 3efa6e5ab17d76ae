"""DeepSpeed's `utils`: its logger, and the safe_get and safe_set functions on parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from zero_runtime.deepspeed.absent import ABSENT_OF_UTILS, missing
from zero_runtime.deepspeed.live_engines import OwnedParameter, owned
from zero_runtime.errors import PlanError
from zero_runtime.world import is_joined, own_rank

logger = logging.getLogger("zero_runtime")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks only: None or -1 among them for all; a process without a group is rank 0."""
    rank = own_rank() if is_joined() else 0
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """A copy of the full value, of the master if there is one. Every rank calls it, between steps."""
    runtime, name = _owner_of(param)
    with runtime.full_params([name]) as values:
        return values[name].float()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor:
    """The full gradient, summed over the ranks. Every rank calls it, after backward and before step."""
    runtime, name = _owner_of(param)
    return runtime.full_grad(name)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """A full optimizer state, such as exp_avg. Every rank calls it."""
    runtime, name = _owner_of(param)
    states = runtime.full_optimizer_state(name)
    if optim_state_key not in states:
        raise PlanError(
            f"safe_get_full_optimizer_state: expected one of {', '.join(states)}, found {optim_state_key!r}"
        )
    return states[optim_state_key]


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the value on every rank by that of rank 0. Every rank calls it, between steps."""
    runtime, name = _owner_of(param)
    with runtime.full_params([name], write=True) as values:
        values[name].copy_(value)


def _owner_of(param: nn.Parameter) -> OwnedParameter:
    found = owned(param)
    if found is None:
        raise PlanError(
            f"expected a parameter of a model that initialize was given, found one of shape {list(param.shape)} that "
            "no engine owns"
        )
    return found


def __getattr__(name: str) -> NoReturn:
    raise missing("zero_runtime.utils", name, ABSENT_OF_UTILS)
