"""DeepSpeed's FusedAdam and DeepSpeedCPUAdam: the optimizer of torch whose constants `initialize` reads.

The updates run on shards, by the runtime's kernels for the device where the states are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zero_runtime.errors import PlanError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


def FusedAdam(
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """torch.optim.AdamW, or Adam if not `adam_w_mode`. DeepSpeed's signature and defaults."""
    if amsgrad and not bias_correction:
        raise PlanError("ops.adam: expected bias_correction=True beside amsgrad, found False; leave one out")
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    made = kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
    for group in made.param_groups:
        group["bias_correction"] = bias_correction  # for initialize; torch's own step does not read it
    return made


def DeepSpeedCPUAdam(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """The same with the arguments of DeepSpeed's optimizer for offloaded states; offload is in the configuration."""
    if not fp32_optimizer_states:
        raise PlanError("ops.adam: expected fp32_optimizer_states=True, found False; the states here are fp32")
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
