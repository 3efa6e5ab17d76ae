"""The point's optimizer as one of torch.optim, with its rates and its clipping, for engines that use torch's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from orchestrator.config.schema import RunConfig
from zero_runtime.optim.configs import AdamConfig, AdamWConfig, SgdConfig, TorchConfig
from zero_runtime.optim.groups import goes_without_decay
from zero_runtime.optim.lr_schedule import Rates

Named = tuple[str, torch.Tensor]


def groups_of(config: RunConfig, named: Iterable[Named]) -> list[dict[str, Any]]:
    """Parameter groups of torch.optim: norms and biases without weight decay, if the point says so."""
    rule = config.optimizer.rule
    decayed, others = list[torch.Tensor](), list[torch.Tensor]()
    for name, param in named:
        bare = rule.no_decay and goes_without_decay(name, tuple(param.shape))
        (others if bare else decayed).append(param)
    groups = [{"params": decayed, "weight_decay": float(rule.decay)}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def optimizer_of(config: RunConfig, named: Iterable[Named]) -> torch.optim.Optimizer:
    """The optimizer of these trained parameters; fused where torch has that."""
    rule, groups, lr = config.optimizer.rule, groups_of(config, named), config.optimizer.lr
    if isinstance(rule, AdamWConfig):
        kind = torch.optim.Adam if isinstance(rule, AdamConfig) else torch.optim.AdamW
        return kind(groups, lr=lr, betas=(rule.beta1, rule.beta2), eps=rule.eps, fused=True)
    if isinstance(rule, SgdConfig):
        return torch.optim.SGD(
            groups, lr=lr, momentum=rule.momentum, dampening=rule.dampening, nesterov=rule.nesterov, fused=True
        )
    assert isinstance(rule, TorchConfig)
    found: torch.optim.Optimizer = getattr(torch.optim, rule.class_name)(groups, lr=lr, **rule.arguments)
    return found


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rates.lr


def clipped_norm(params: Sequence[nn.Parameter], clip_norm: float | None) -> float | None:
    """Clips the gradients; their norm before that. None without clipping, where a loop would not compute it."""
    if clip_norm is None:
        return None
    norm = nn.utils.clip_grad_norm_(params, clip_norm, foreach=True)
    full = getattr(norm, "full_tensor", None)  # of sharded gradients
    return float(norm if full is None else full())


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """The optimizer's tensors by name, this rank's shards; without the step counts."""
    found: dict[str, list[torch.Tensor]] = {}
    for states in optimizer.state.values():
        for name, state in states.items():
            if isinstance(state, torch.Tensor) and name != "step":
                found.setdefault(name, []).append(local(state))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()
