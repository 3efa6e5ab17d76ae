"""Gives a model on the meta device its first values, runs a module's forward in autocast, and tells tensors apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from orchestrator.wings.engines.contract import Task


def whole(task: Task) -> nn.Module:
    """The task's model with all its values on its device, parameters in fp32. Parameters that are one stay one."""
    made: dict[int, nn.Parameter] = {}
    for name, param in list(task.model.named_parameters()):
        value = task.first_value(name, param).to(task.device, torch.float32)
        made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
    replace(task.model, made)
    return task.model.to(task.device)  # the buffers


def replace(model: nn.Module, made: dict[int, nn.Parameter]) -> None:
    """Puts other parameters in the place of those with these ids, wherever a module uses them."""
    for module in model.modules():
        for key, param in list(module._parameters.items()):
            if param is not None and id(param) in made:
                module._parameters[key] = made[id(param)]


def run_in_autocast(module: nn.Module, device: torch.device, dtype: str) -> None:
    """Lets the module's forward compute in a 16-bit dtype, with weights that stay as they are."""
    forward: Callable[..., Any] = module.forward

    def in_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])):
            return forward(*args, **kwargs)

    module.forward = in_autocast


def apart(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Those that exist, without those inside another: a rank's gradient can be a part of a larger tensor."""
    kept: list[torch.Tensor] = []
    for one in sorted((one for one in tensors if one is not None), key=lambda one: (one.data_ptr(), -one.nbytes)):
        if one.nbytes and not (kept and one.data_ptr() < kept[-1].data_ptr() + kept[-1].nbytes):
            kept.append(one.detach())
    return kept
