"""The point's optimizer as one of torch.optim, and its update, for engines that use torch's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from orchestrator.config.schema import RunConfig
from orchestrator.wings.engines.contract import Updated
from orchestrator.wings.engines.optimizer_words import optimizer_words
from zero_runtime.errors import NonFiniteError
from zero_runtime.optim.groups import goes_without_decay
from zero_runtime.optim.loss_scaler import UNSCALED
from zero_runtime.optim.lr_schedule import Rates

Named = tuple[str, torch.Tensor]


def groups_of(config: RunConfig, named: Iterable[Named]) -> list[dict[str, Any]]:
    """Parameter groups of torch.optim: norms and biases without weight decay, if the point says so."""
    rule = config.optimizer.rule
    decayed, others = list[torch.Tensor](), list[torch.Tensor]()
    for name, param in named:
        shape = getattr(param, "ds_shape", param.shape)  # DeepSpeed's stage 3 leaves a parameter without its own
        bare = rule.no_decay and goes_without_decay(name, tuple(shape))
        (others if bare else decayed).append(param)
    groups = [{"params": decayed, "weight_decay": float(rule.decay)}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def optimizer_of(config: RunConfig, named: Iterable[Named]) -> torch.optim.Optimizer:
    """The optimizer of these trained parameters; fused where torch has that."""
    name, arguments = optimizer_words(config)
    found: torch.optim.Optimizer = getattr(torch.optim, name)(groups_of(config, named), **arguments)
    return found


class Update:
    """The update of all trained parameters: the norm of the gradients, clipping, the optimizer, and fp16's loss scale
    by the point's rule.

    named: each trained parameter's name and tensor, in the dtype of the master; a DTensor where it is sharded, so that
    a norm is that of all shards. All ranks make the same calls.
    """

    def __init__(self, config: RunConfig, named: Iterable[Named]) -> None:
        self._config, self._named = config, dict(named)
        self.params = list(self._named.values())
        self.optimizer = optimizer_of(config, self._named.items())
        self._clip_norm, self._scales = config.optimizer.clip_norm, config.precision.scales_loss
        self._scaler = (config.precision.scale if self._scales else UNSCALED).start()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss whose backward gives gradients for `step`."""
        return loss * self._scaler.scale if self._scales else loss

    def step(self, rates: Rates) -> Updated:
        """Updates, unless fp16 gradients overflowed, and drops the gradients. NonFiniteError on every rank if the loss
        scale cannot be lowered further."""
        scale, norm = self._scaler.scale, self._clipped_norm()
        # Only a loss scale needs the norm on the host before the update: reading it waits for all of the backward.
        overflow = self._scales and norm is not None and not math.isfinite(float(norm))
        if overflow and self._scaler.exhausted:
            raise NonFiniteError(f"the gradients overflow at the lowest loss scale, {scale:g}; use precision=bf16")
        if not overflow:
            for group in self.optimizer.param_groups:
                group["lr"] = rates.lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._scaler = self._scaler.after(overflow=overflow)
        return Updated(norm, overflow, scale)

    def _clipped_norm(self) -> torch.Tensor | None:
        """Clips the gradients; their norm before that, 0-dim. None where a loop would not compute it: without
        clipping and loss scale."""
        if self._clip_norm is None and not self._scales:
            return None
        if self._scales:
            torch._foreach_mul_(self.grads(), 1 / self._scaler.scale)
        most = math.inf if self._clip_norm is None else self._clip_norm
        norm = nn.utils.clip_grad_norm_(self.params, most, foreach=True)
        full = getattr(norm, "full_tensor", None)  # of sharded gradients
        return norm if full is None else full()

    def begin_again(self, values: Iterable[Named]) -> None:
        """Gives the parameters these values by their names, and all else its state before the first step."""
        for name, value in values:
            own: Any = self._named[name].detach()
            if hasattr(own, "placements"):
                from torch.distributed.tensor import distribute_tensor

                # Without a source each rank takes its part of its own value.
                value = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
            local(own).copy_(local(value))
        # Only the states: a rate or a decay that somebody has set in the groups stays.
        self.optimizer.state.clear()
        self.optimizer.state.update(optimizer_of(self._config, self._named.items()).state)
        self._scaler = (self._config.precision.scale if self._scales else UNSCALED).start()

    def grads(self) -> list[torch.Tensor]:
        """The gradients that exist now, of this rank's shards."""
        return [local(param.grad) for param in self.params if param.grad is not None]

    def states(self) -> dict[str, list[torch.Tensor]]:
        return states_of(self.optimizer)


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """The optimizer's tensors by name, of this rank's shards; without the step counts."""
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
