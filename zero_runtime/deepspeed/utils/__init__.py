"""DeepSpeed's `utils`: its logger, the safe_get and safe_set functions on parameters, and helpers for scripts.

Every rank calls the functions on parameters. Those with `full` in their names are collectives, for which the value of
rank 0 counts; those with `local` are about the rank's own elements, see [Note: local elements] in shard_values.py. A
frozen parameter has no master, gradient and states: safe_get returns None, safe_set raises PlanError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_runtime.checkpoint.layout import MASTER
from zero_runtime.deepspeed import leaf_modules, on_device
from zero_runtime.deepspeed.absent import lazy_modules
from zero_runtime.deepspeed.live_engines import OwnedParameter, owned
from zero_runtime.deepspeed.runtime import dataloader
from zero_runtime.deepspeed.shard_values import GRAD, is_trained, read_full, read_own, write_full, write_own
from zero_runtime.deepspeed.utils import logging
from zero_runtime.errors import PlanError

_FURTHER = (dataloader, leaf_modules, logging, on_device)  # whose functions and classes are names of this module too
logger = logging.logger


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of the full master. Between steps."""
    return _read(read_full, param, MASTER)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of the full gradient, summed over the ranks and without the loss scale. After backward and before step.

    Before the ranks' gradients are summed (no_sync; below stage 2 within an accumulation) it is that of this rank's own
    losses.
    """
    return _read(read_full, param, GRAD)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy of a full optimizer state, such as exp_avg."""
    return _read(read_full, param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the full weights."""
    write_full(_owner_of(param), MASTER, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the full gradient, as safe_get_full_grad returns it; the step clips and uses the new one."""
    write_full(_owner_of(param), GRAD, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace a full optimizer state."""
    write_full(_owner_of(param), optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of this rank's elements of the master, 1-D."""
    return _read(read_own, param, MASTER)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of this rank's elements of the summed gradient, 1-D."""
    return _read(read_own, param, GRAD)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy of this rank's elements of an optimizer state, 1-D."""
    return _read(read_own, param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements of the weights."""
    write_own(_owner_of(param), MASTER, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements of the summed gradient."""
    write_own(_owner_of(param), GRAD, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's elements of an optimizer state."""
    write_own(_owner_of(param), optim_state_key, value)


def _read(read: Callable[[OwnedParameter, str], torch.Tensor], param: nn.Parameter, state: str) -> torch.Tensor | None:
    found = _owner_of(param)
    return read(found, state) if is_trained(found) else None


def _owner_of(param: nn.Parameter) -> OwnedParameter:
    found = owned(param)
    if found is None:
        raise PlanError(
            f"expected a parameter of a model that initialize was given, found one of shape {list(param.shape)} that "
            "no engine owns"
        )
    return found


def __getattr__(name: str) -> Any:
    for module in _FURTHER:
        found = vars(module).get(name)
        if getattr(found, "__module__", None) == module.__name__:
            return found
    return lazy_modules(__name__, "groups", "zero_to_fp32")(name)
