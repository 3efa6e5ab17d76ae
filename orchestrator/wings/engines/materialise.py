"""Gives a model on the meta device its first values, and tells tensors apart."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from orchestrator.wings.engines.contract import Task


def whole(task: Task, frozen: torch.dtype = torch.float32) -> nn.Module:
    """The task's model with all its values on its device: trained parameters in fp32, and frozen ones in their dtype.
    Parameters that are one stay one."""
    made: dict[int, nn.Parameter] = {}
    for name, param in list(task.model.named_parameters()):
        value = task.first_value(name, param).to(task.device, torch.float32 if param.requires_grad else frozen)
        made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
    replace(task.model, made, task.device)
    return task.model


def replace(model: nn.Module, made: dict[int, nn.Parameter], device: torch.device) -> None:
    """Puts other parameters, which are on the device, in the place of those with these ids, wherever a module uses
    them, and moves the buffers to it."""
    for module in model.modules():
        for key, param in list(module._parameters.items()):
            if param is not None and id(param) in made:
                module._parameters[key] = made[id(param)]
    model.to(device)


def apart(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Those that exist, without those inside another: a rank's gradient can be a part of a larger tensor."""
    kept: list[torch.Tensor] = []
    for one in sorted((one for one in tensors if one is not None), key=lambda one: (one.data_ptr(), -one.nbytes)):
        if one.nbytes and not (kept and one.data_ptr() < kept[-1].data_ptr() + kept[-1].nbytes):
            kept.append(one.detach())
    return kept
