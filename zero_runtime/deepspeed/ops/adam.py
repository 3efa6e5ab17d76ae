"""DeepSpeed's FusedAdam and DeepSpeedCPUAdam: the optimizer of torch whose constants `initialize` reads.

The updates run on shards, by the runtime's kernels for the device where the states are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zero_runtime.errors import PlanError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _Adam(torch.optim.Adam):
    """Adam, or AdamW if the weight decay is decoupled."""

    def __init__(self, params: Iterable[Any], bias_correction: bool, **constants: Any) -> None:
        if constants["amsgrad"] and not bias_correction:
            raise PlanError("ops.adam: expected bias_correction=True beside amsgrad, found False; leave one out")
        super().__init__(params, **constants)
        for group in self.param_groups:
            group["bias_correction"] = bias_correction  # for initialize; torch's own step does not read it


class FusedAdam(_Adam):
    """AdamW, or Adam if not `adam_w_mode`. DeepSpeed's signature and defaults."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        constants: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, bias_correction, lr=lr, decoupled_weight_decay=adam_w_mode, **constants)


class DeepSpeedCPUAdam(_Adam):
    """The same with the arguments of DeepSpeed's optimizer for offloaded states; offload is in the configuration."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise PlanError("ops.adam: expected fp32_optimizer_states=True, found False; the states here are fp32")
        constants: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(model_params, bias_correction, lr=lr, decoupled_weight_decay=adamw_mode, **constants)
