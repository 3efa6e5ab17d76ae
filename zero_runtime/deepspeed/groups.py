"""Reads the parameter groups and their constants from model_parameters or from a torch optimizer.

Parameters are compared by identity, so parameters of another model, or of a copy of the model, are detected.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import nn

from zero_runtime.deepspeed.named_optimizer import NamedOptimizer
from zero_runtime.deepspeed.optimizer_section import ChosenOptimizer, torch_arguments, torch_default
from zero_runtime.deepspeed.probed_optimizer import probed_config
from zero_runtime.deepspeed.schedule_section import SECOND_BETA, ScheduleOf
from zero_runtime.errors import PlanError, some
from zero_runtime.optim.configs import (
    TORCH_OURS,
    AdamConfig,
    AdamWConfig,
    LionConfig,
    LrScaling,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
    TorchConfig,
    torch_problem,
)
from zero_runtime.optim.groups import ParamGroup

_NO_MATRIX = re.compile("embed|lm_head")  # names that DeepSpeed leaves to Adam
_GROUP_KEYS = ("params", "lr", "weight_decay", "name")
_PER_GROUP = ("params", "lr", "weight_decay", "initial_lr", "name", "param_names")


@dataclass(frozen=True)
class Trained:
    """The optimizer with its groups, and torch's view of these: dicts with params, lr, weight_decay and momentum.

    left_out: the parameters that require a gradient and are in no group, by name.
    """

    config: OptimizerConfig
    param_groups: list[dict[str, Any]]
    left_out: Mapping[str, nn.Parameter] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Sentences for the user."""
        if not self.left_out:
            return []
        more = len(self.left_out) - 3
        some = ", ".join([*self.left_out][:3]) + (f" and {more} more" if more > 0 else "")
        return [
            f"{some}: in no group of the optimizer, so not trained, as in DeepSpeed; requires_grad is False until "
            "engine.destroy(), and they get no gradients"
        ]

    def fitted_to(self, schedule: ScheduleOf) -> tuple[ScheduleOf, Trained, list[str]]:
        """The schedule and these groups as `ScheduleOf.fit` has them, and its notes."""
        if any(len({*schedule.values[name]}) > 1 for name in schedule.by_group if name.endswith("_mom")):
            raise PlanError("scheduler.params: expected one momentum for all groups, found lists; give one number")
        fitted, config, notes = schedule.fit(self.config)
        if config is not self.config:
            for group in self.param_groups:
                group["betas"] = (group["betas"][0], SECOND_BETA)
        return fitted, replace(self, config=config), notes


def groups_of_parameters(model: nn.Module, given: Iterable[Any] | None, chosen: ChosenOptimizer) -> Trained:
    """Read model_parameters: None for all, parameters, or groups of them, each with its own lr and weight_decay."""
    items = list(model.parameters() if given is None else given)
    if not items:
        raise PlanError("model_parameters: expected parameters or groups of them, found none; leave it out for all")
    if not all(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    if isinstance(chosen.config, MuonConfig):
        chosen, items = _in_halves(model, chosen, items)
    shown = _shown(chosen.config)
    groups = []
    for index, item in enumerate(items):
        unknown = sorted(set(item) - set(_GROUP_KEYS))
        if unknown:
            raise PlanError(
                f"model_parameters, group {index}: expected {', '.join(_GROUP_KEYS)}, found {', '.join(unknown)}; "
                "other constants are the same for all groups: set them in optimizer.params"
            )
        usual = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
        params = [item["params"]] if isinstance(item["params"], torch.Tensor) else list(item["params"])
        groups.append({**shown, **usual, **item, "params": params})
    return _trained(model, chosen.config, groups, "model_parameters")


def _in_halves(model: nn.Module, chosen: ChosenOptimizer, items: list[Any]) -> tuple[ChosenOptimizer, list[Any]]:
    """Muon with the matrices that DeepSpeed gives it, and each group as two: its matrices, and its other parameters,
    whose rate is AdamW's. PlanError for parameters of more dimensions."""
    assert isinstance(chosen.config, MuonConfig)
    named = {name: one for name, one in model.named_parameters() if not _NO_MATRIX.search(name.lower())}
    if deep := [name for name, one in named.items() if one.dim() > 2]:
        told = "of at most two dimensions (DeepSpeed takes the rows of others as a matrix)"
        raise PlanError(f"optimizer.type Muon: expected parameters {told}, found {some(deep)}; use AdamW")
    own = {id(one): name for name, one in named.items() if one.dim() == 2}
    halves = []
    for item in items:
        params = [item["params"]] if isinstance(item["params"], torch.Tensor) else list(item["params"])
        for is_matrix, rate in ((True, chosen.lr), (False, chosen.lr * chosen.config.adamw_lr_ratio)):
            if half := [param for param in params if (id(param) in own) == is_matrix]:
                halves.append({"lr": rate, **item, "params": half})
    config = replace(chosen.config, matrices=list(own.values()), adamw_lr_ratio=1.0)
    return replace(chosen, config=config), halves


def groups_of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    """Read an instance of a class of torch.optim, of a subclass with the same update, or of another element-wise class.

    Its group dicts are used, so its schedulers drive the engine too.
    """
    if isinstance(optimizer, NamedOptimizer):
        trained = groups_of_parameters(model, optimizer.param_groups, optimizer.chosen)
        for group, whole in zip(optimizer.param_groups, trained.param_groups, strict=True):
            group.update(whole)
        return replace(trained, param_groups=optimizer.param_groups)
    name = _torch_class(optimizer)
    if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad's constructor makes its states
        raise PlanError(
            f"optimizer: expected a new {name or type(optimizer).__qualname__}, found one with states, which would be "
            "lost: it has stepped, or its constructor made them; hand it over before its first step"
        )
    first = optimizer.param_groups[0]
    for index, group in enumerate(optimizer.param_groups):
        differing = [key for key in first if key not in _PER_GROUP and group[key] != first[key]]
        if differing:
            raise PlanError(
                f"optimizer: group {index} has a {differing[0]} of its own ({group[differing[0]]!r}, group 0 has "
                f"{first[differing[0]]!r}): expected groups to differ in lr and weight_decay alone"
            )
    if name == "Muon":
        config: OptimizerConfig = _torch_muon(model, optimizer)
    else:
        config = _config_of(name, first) if name else probed_config(optimizer)
    return _trained(model, config, optimizer.param_groups, "optimizer")


def _torch_class(optimizer: torch.optim.Optimizer) -> str:
    """The class of torch.optim whose update it makes: its own, or one that it inherits `step` from; else empty."""
    own = type(optimizer)
    name = next((kind.__name__ for kind in own.__mro__ if kind is getattr(torch.optim, kind.__name__, None)), "")
    base = getattr(torch.optim, name)
    if name == "Optimizer" or any(_plain(own, one) is not _plain(base, one) for one in ("step", "_init_group")):
        return ""
    if name != "Muon" and (problem := torch_problem(name)):
        raise PlanError(f"optimizer: {problem}")
    return name


def _plain(kind: type, method: str) -> Any:
    """The method without the wrappers that torch puts around it."""
    found = getattr(kind, method, None)
    return found and inspect.unwrap(found)


def _config_of(name: str, group: Mapping[str, Any]) -> OptimizerConfig:
    """The runtime's own optimizer if it has one with the same algorithm, else torch's class, run on the shards."""
    if name == "Adam" and group.get("decoupled_weight_decay"):
        name = "AdamW"
    decay = float(group.get("weight_decay", 0.0))
    plain = not group.get("amsgrad") and not group.get("maximize")
    if name in ("Adam", "AdamW") and plain:
        beta1, beta2 = map(float, group["betas"])
        kind, corrects = AdamWConfig if name == "AdamW" else AdamConfig, bool(group.get("bias_correction", True))
        return kind(beta1, beta2, float(group["eps"]), decay, no_decay=False, corrects_bias=corrects)
    if name == "SGD" and plain:
        numbers = float(group["momentum"]), float(group["dampening"]), decay
        return SgdConfig(*numbers, bool(group["nesterov"]), no_decay=False)
    accepted = [argument for argument in torch_arguments(name) if argument not in TORCH_OURS]
    arguments = {argument: group[argument] for argument in accepted if argument in group}
    return TorchConfig(name, arguments, decay, no_decay=False)


def _torch_muon(model: nn.Module, optimizer: torch.optim.Optimizer) -> MuonConfig:
    """The runtime's Muon for a torch.optim.Muon; PlanError for constants that it does not have."""
    group = optimizer.param_groups[0]
    scaling: Any = group["adjust_lr_fn"] or "original"
    others = [name for name in ("ns_coefficients", "eps") if group[name] != torch_default("Muon", name)]
    if others or scaling not in get_args(LrScaling):
        told = f"the default ns_coefficients and eps, and adjust_lr_fn of {' or '.join(get_args(LrScaling))}"
        raise PlanError(f"optimizer: torch.optim.Muon: expected {told}, found {others or scaling}; leave it out")
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    matrices = [name for name, param in model.named_parameters() if id(param) in own]
    constants = {name: group[name] for name in ("momentum", "nesterov", "ns_steps", "weight_decay")}
    return MuonConfig(lr_scaling=scaling, matrices=matrices, no_decay=False, **constants)


def _trained(model: nn.Module, config: OptimizerConfig, groups: list[dict[str, Any]], source: str) -> Trained:
    names = {id(param): name for name, param in model.named_parameters()}
    named = []
    for index, group in enumerate(groups):
        for param in group["params"]:
            if id(param) not in names:
                shape = f"of shape {list(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
                raise PlanError(
                    f"{source}, group {index}: expected parameters of the model, found a {type(param).__name__} "
                    f"{shape} that is none; make it from model.parameters() of the model that you hand over"
                )
        decay = float(group.get("weight_decay", 0.0))
        named.append(ParamGroup(tuple(names[id(param)] for param in group["params"]), 1.0, decay))
    covered = {name for group in named for name in group.names}
    left_out = {name: param for name, param in model.named_parameters() if param.requires_grad and name not in covered}
    if covered and not any(param.requires_grad for group in groups for param in group["params"]) and left_out:
        raise PlanError(f"{source}: expected a parameter that requires a gradient, found {len(covered)} that do not")
    return Trained(replace(config, groups=tuple(named)), groups, left_out)


def _shown(config: OptimizerConfig) -> dict[str, Any]:
    """The constants that torch schedulers expect in a group."""
    if isinstance(config, AdamWConfig):
        return {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if isinstance(config, LionConfig):
        return {"betas": (config.beta1, config.beta2)}
    if isinstance(config, MuonConfig):
        return {"momentum": config.momentum}
    if isinstance(config, SgdConfig):
        return {"momentum": config.momentum, "dampening": config.dampening, "nesterov": config.nesterov}
    assert isinstance(config, TorchConfig)
    arguments = dict(config.arguments)
    if config.uses_betas:
        arguments.setdefault("betas", torch_default(config.class_name, "betas"))
    return arguments
