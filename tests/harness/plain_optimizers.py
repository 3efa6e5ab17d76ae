"""The optimizers of one process of plain PyTorch: torch's own where it has them, Lion and LAMB from their papers."""

from __future__ import annotations

from typing import Any

import torch

from kernels.block_formats import dynamic_codes
from zero_runtime.optimizers import (
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
)


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, algorithm 2."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                direction = torch.sign(torch.add(beta1 * momentum, param.grad, alpha=1 - beta1))
                decayed = param * (1 - group["lr"] * group["weight_decay"])
                param.copy_(torch.add(decayed, direction, alpha=-group["lr"]))
                momentum.copy_(torch.add(beta2 * momentum, param.grad, alpha=1 - beta2))


class Lamb(torch.optim.Optimizer):
    """arXiv 1904.00962, algorithm 2, with the identity for the scaling function."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
                state["step"] += 1
                state["m"].lerp_(param.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                first = state["m"] / (1 - beta1 ** state["step"])
                second = state["v"] / (1 - beta2 ** state["step"])
                update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * param
                weight_norm, update_norm = param.double().norm(), update.double().norm()
                ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else torch.ones(())
                param.sub_(group["lr"] * ratio.float() * update)


class AdamW8bit(torch.optim.AdamW):
    """Torch's AdamW whose moments are rounded to 8-bit codes after each step, in blocks of 256 of each parameter."""

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                for name in ("exp_avg", "exp_avg_sq"):
                    moment = self.state[param][name]
                    for block in moment.view(-1).split(256):
                        block.copy_(rounded_to_codes(block, signed=name == "exp_avg"))


def rounded_to_codes(block: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Each value's nearest code times the block's scale, code by code of the table."""
    table = dynamic_codes(block.device, signed=signed)
    most = block.abs().max()
    scale = most if bool((block == most).any()) else -most
    share = torch.where(scale != 0, block / scale, 0.0)
    code = (share[:, None] > (table[:-1] + table[1:]) / 2).sum(1)
    if not signed:
        code = torch.where((code == 0) & (block > 0), 1, code)
    return table[code] * scale


def plain_optimizer(config: OptimizerConfig, masters: dict[str, torch.Tensor], lr: float) -> torch.optim.Optimizer:
    """What `config` means, over named fp32 tensors. Norms and biases are those of no or one dimension."""
    groups = [group for group in _groups(config, masters, lr) if group["params"]]
    if isinstance(config, LionConfig):
        return Lion(groups, {"betas": (config.beta1, config.beta2)})
    if isinstance(config, LambConfig):
        return Lamb(groups, {"betas": (config.beta1, config.beta2), "eps": config.eps})
    if isinstance(config, AdamW8bitConfig):
        return AdamW8bit(groups, betas=(config.beta1, config.beta2), eps=config.eps, foreach=False)
    name, arguments = _torch_class(config)
    if name == "Rprop":
        for group in groups:
            del group["weight_decay"]
    return getattr(torch.optim, name)(groups, **arguments, foreach=False)


def _torch_class(config: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(config, SgdConfig):
        keys = ("momentum", "dampening", "nesterov")
        return "SGD", {key: vars(config)[key] for key in keys}
    if isinstance(config, AdamWConfig):
        name = "Adam" if isinstance(config, AdamConfig) else "AdamW"
        return name, {"betas": (config.beta1, config.beta2), "eps": config.eps}
    return config.class_name, dict(config.arguments)


def _groups(config: OptimizerConfig, masters: dict[str, torch.Tensor], lr: float) -> list[dict[str, Any]]:
    groups = []
    for name, master in masters.items():
        mine = next((group for group in config.groups if name in group.names), None)
        decay = None if mine is None else mine.weight_decay
        if decay is None:
            decay = 0.0 if config.no_decay and master.dim() <= 1 else config.decay
        scale = 1.0 if mine is None else mine.lr_scale
        groups.append({"params": [master], "lr": lr * scale, "weight_decay": decay})
    return groups
