"""Optimizers on full tensors, for one process of plain PyTorch.

AdamW, Adam and SGD have the algorithms and order of operations of `torch.optim`, Lion and LAMB those of their papers.
They consist of additions, multiplications, divisions and square roots that each round once, so every machine computes
the same bits. tests/kernels/test_torch_optim.py bounds their distance from `torch.optim`. Other classes are torch's
own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim._muon import _zeropower_via_newtonschulz as torch_orthogonalised

from zero_runtime.kernels.block_formats import dynamic_codes
from zero_runtime.kernels.reference import LEAST_NORM, NEWTON_SCHULZ
from zero_runtime.optim.configs import (
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
)


def root(values: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root, computed in fp64: torch's own fp32 root differs between processors."""
    return values.double().sqrt().float()


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW; with `l2`, torch.optim.Adam."""

    l2 = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in (one for one in group["params"] if one.grad is not None):
                state = self.state[param]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                state["step"] += 1
                self.update(param, state, group)

    def update(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad, step = param.grad, int(state["step"])
        beta1, beta2 = group["betas"]
        if self.l2 and group["weight_decay"]:
            grad = grad + group["weight_decay"] * param
        elif not self.l2:
            param *= 1 - group["lr"] * group["weight_decay"]
        exp_avg, exp_avg_sq = (
            first_moment(state["exp_avg"], grad, beta1),
            second_moment(state["exp_avg_sq"], grad, beta2),
        )
        state.update(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        divisor = root(exp_avg_sq) / math.sqrt(1 - beta2**step) + group["eps"]
        param += -(group["lr"] / (1 - beta1**step)) * exp_avg / divisor


class Adam(AdamW):
    l2 = True


def first_moment(moment: torch.Tensor, grad: torch.Tensor, beta: float) -> torch.Tensor:
    """beta * moment + (1 - beta) * grad in the form of torch's lerp."""
    weight = torch.tensor(1 - beta, dtype=torch.float32)
    if weight < 0.5:
        return moment + weight * (grad - moment)
    return grad - (grad - moment) * (1 - weight)


def second_moment(moment: torch.Tensor, grad: torch.Tensor, beta: float) -> torch.Tensor:
    return moment * beta + ((1 - beta) * grad) * grad


class Sgd(torch.optim.Optimizer):
    """torch.optim.SGD."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "nesterov": nesterov})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            momentum = group["momentum"]
            for param in (one for one in group["params"] if one.grad is not None):
                step = param.grad + group["weight_decay"] * param if group["weight_decay"] else param.grad
                if momentum:
                    state = self.state[param]
                    old = state.get("momentum_buffer")
                    new = step.clone() if old is None else momentum * old + (1 - group["dampening"]) * step
                    state["momentum_buffer"] = new
                    step = step + momentum * new if group["nesterov"] else new
                param += -group["lr"] * step


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, algorithm 2."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * param.grad)
                decayed = param * (1 - group["lr"] * group["weight_decay"])
                param.copy_(decayed + -group["lr"] * direction)
                momentum.copy_(beta2 * momentum + (1 - beta2) * param.grad)


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
                state["m"] = first_moment(state["m"], param.grad, beta1)
                state["v"] = second_moment(state["v"], param.grad, beta2)
                first = state["m"] / (1 - beta1 ** state["step"])
                second = state["v"] / (1 - beta2 ** state["step"])
                update = first / (root(second) + group["eps"]) + group["weight_decay"] * param
                weight_norm, update_norm = param.double().norm(), update.double().norm()
                ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else torch.ones(())
                param.sub_(group["lr"] * (ratio.float() * update))


class AdamW8bit(AdamW):
    """AdamW whose moments are rounded to 8-bit codes after each step, in blocks of 256 of each parameter."""

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
    """Each value rounded to its nearest code, times the block's scale, by comparison with the complete table."""
    table = dynamic_codes(block.device, signed=signed)
    most = block.abs().max()
    scale = most if bool((block == most).any()) else -most
    share = torch.where(scale != 0, block / scale, 0.0)
    code = (share[:, None] > (table[:-1] + table[1:]) / 2).sum(1)
    if not signed:
        code = torch.where((code == 0) & (block > 0), 1, code)
    return table[code] * scale


class Muon(torch.optim.Optimizer):
    """Keller Jordan's Muon for matrices, with torch's own orthogonalisation, and AdamW for the rest."""

    def __init__(self, groups: list[dict[str, Any]], config: MuonConfig) -> None:
        super().__init__(groups, {})
        rest = [{**group, "lr": group["lr"] * config.adamw_lr_ratio} for group in groups if not group["matrix"]]
        self.config, self.adamw = config, AdamW(rest, betas=(config.beta1, config.beta2), eps=config.eps)

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for group in (one for one in self.param_groups if one["matrix"]):
            (param,) = group["params"]
            state = self.state[param]
            old = state.get("momentum_buffer", torch.zeros_like(param))
            new = state["momentum_buffer"] = first_moment(old, param.grad, self.config.momentum)
            # torch's lerp from the gradient to the buffer
            factor = torch.tensor(self.config.momentum, dtype=torch.float32)
            direction = new - (new - param.grad) * (1 - factor) if self.config.nesterov else new
            if self.config.ns_dtype == "fp32":
                update = in_fp32(direction, self.config.ns_steps)
            else:
                update = torch_orthogonalised(direction, NEWTON_SCHULZ, self.config.ns_steps, LEAST_NORM).float()
            sides = param.shape
            factor = 0.2 * math.sqrt(max(sides))
            if self.config.lr_scaling == "original":
                factor = math.sqrt(max(1, sides[0] / sides[1]))
            param *= 1 - group["lr"] * group["weight_decay"]
            param += -group["lr"] * factor * update


def in_fp32(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The published iteration in fp32."""
    a, b, c = NEWTON_SCHULZ
    found = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = found / found.double().norm().float().clamp(min=LEAST_NORM)
    for _ in range(steps):
        square = found @ found.T
        found = torch.addmm(found, torch.addmm(square, square, square, beta=b, alpha=c), found, beta=a)
    return found.T if matrix.shape[0] > matrix.shape[1] else found


def plain_optimizer(config: OptimizerConfig, masters: dict[str, torch.Tensor], lr: float) -> torch.optim.Optimizer:
    """The optimizer that `config` describes, over named fp32 tensors. Norms and biases are the tensors with at most one
    dimension. States in bf16 are rounded after each step."""
    plain = _plain_optimizer(config, masters, lr)
    if vars(config).get("state_dtype") == "bf16":
        plain.register_step_post_hook(_round_states)
    return plain


def _round_states(plain: torch.optim.Optimizer, *_: Any) -> None:
    for state in plain.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.copy_(value.bfloat16())


def _plain_optimizer(config: OptimizerConfig, masters: dict[str, torch.Tensor], lr: float) -> torch.optim.Optimizer:
    groups = [group for group in _groups(config, masters, lr) if group["params"]]
    if isinstance(config, LionConfig):
        return Lion(groups, {"betas": (config.beta1, config.beta2)})
    if isinstance(config, LambConfig):
        return Lamb(groups, {"betas": (config.beta1, config.beta2), "eps": config.eps})
    if isinstance(config, MuonConfig):
        return Muon(groups, config)
    if isinstance(config, AdamW8bitConfig):
        return AdamW8bit(groups, betas=(config.beta1, config.beta2), eps=config.eps)
    if isinstance(config, AdamWConfig):
        kind = Adam if isinstance(config, AdamConfig) else AdamW
        return kind(groups, betas=(config.beta1, config.beta2), eps=config.eps)
    if isinstance(config, SgdConfig):
        return Sgd(groups, **{key: vars(config)[key] for key in ("momentum", "dampening", "nesterov")})
    name, arguments = config.class_name, dict(config.arguments)
    if name == "Rprop":
        for group in groups:
            del group["weight_decay"]
    return getattr(torch.optim, name)(groups, **arguments, foreach=False)


_BLOCKS = ("blocks.", ".layers.", ".h.")  # in the names of the parameters of repeated blocks


def _groups(config: OptimizerConfig, masters: dict[str, torch.Tensor], lr: float) -> list[dict[str, Any]]:
    groups = []
    for name, master in masters.items():
        mine = next((group for group in config.groups if name in group.names), None)
        decay = None if mine is None else mine.weight_decay
        if decay is None:
            decay = 0.0 if config.no_decay and master.dim() <= 1 else config.decay
        scale = 1.0 if mine is None else mine.lr_scale
        group = {"params": [master], "lr": lr * scale, "weight_decay": decay}
        if isinstance(config, MuonConfig):
            group["matrix"] = master.dim() == 2 and any(part in name for part in _BLOCKS)
        groups.append(group)
    return groups
