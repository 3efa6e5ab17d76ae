"""Converts the section optimizer, its type and constants with DeepSpeed's names, to an optimizer of the runtime."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_runtime.deepspeed.json_text import shown
from zero_runtime.deepspeed.schema import ANY, BOOL, NUMBER, PAIR, TEXT, WHOLE, Key, Reader, all_idle, mapped, only
from zero_runtime.optim.configs import (
    TORCH_NAMES,
    TORCH_OURS,
    TORCH_REFUSED,
    AdamConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OneBitAdamConfig,
    OptimizerConfig,
    SgdConfig,
    TorchConfig,
)

_DEFAULT_LR = 1e-3  # the default of DeepSpeed's Adam, Lion and Lamb


@dataclass(frozen=True)
class ChosenOptimizer:
    """An optimizer without its groups, and the learning rate and weight decay of groups that give none."""

    config: OptimizerConfig
    lr: float
    weight_decay: float


_WIDTH = "muP's scaling by width is not here; give groups with rates of their own to AdamW or SGD"
_REFUSED = {
    "onebitlamb": "its ratios of compressed momenta are not here; the nearest are Lamb and OneBitAdam",
    "zerooneadam": "its steps without messages are not here; the nearest is OneBitAdam, whose steps all have one",
    **dict.fromkeys(("muadam", "muadamw", "musgd"), _WIDTH),
    **{name.lower(): reason for name, reason in TORCH_REFUSED.items()},
}
_COMMON = {
    **dict.fromkeys(("lr", "weight_decay"), mapped(NUMBER)),
    **all_idle(ANY, "foreach", "fused", "capturable"),
    "differentiable": only(False, kind=BOOL, reason="updates are not differentiated; set it to false"),
    **all_idle(BOOL, "set_grad_none"),
    "max_grad_norm": Key(ANY, only=(), reason="it belongs at the top level, as gradient_clipping"),
}
_MOMENTS = {**_COMMON, "betas": mapped(PAIR), "eps": mapped(NUMBER)}
_FP32_STATES = only(True, kind=BOOL, reason="optimizer states are fp32 here")
_ADAM = {
    **_MOMENTS,
    **dict.fromkeys(("amsgrad", "adam_w_mode", "torch_adam", "bias_correction"), mapped(BOOL)),
    "fp32_optimizer_states": _FP32_STATES,
}
_ONE_BIT_ADAM = {
    **_MOMENTS,
    "freeze_step": mapped(WHOLE),
    "amsgrad": only(False, kind=BOOL, reason="1-bit Adam has none"),
    # DeepSpeed's class has the first two and reads neither.
    **all_idle(BOOL, "bias_correction", "eps_inside_sqrt", "cuda_aware"),
    **all_idle(TEXT, "comm_backend_name"),
}
_LION = {**_COMMON, "betas": mapped(PAIR)}
_LAMB = {
    **_MOMENTS,
    "bias_correction": mapped(BOOL),
    "amsgrad": only(False, kind=BOOL, reason="Lamb has none"),
    "eps_inside_sqrt": only(False, kind=BOOL, reason="eps is added to the root here"),
    **dict.fromkeys(("max_coeff", "min_coeff"), mapped(NUMBER)),
}
_MUON = {
    **_MOMENTS,
    **dict.fromkeys(("muon_lr", "adam_lr", "momentum"), mapped(NUMBER)),
    "ns_method": Key(TEXT, acts=True, only=("gram", "standard"), reason="DeepSpeed has two"),
    "adam_w_mode": only(True, kind=BOOL, reason="what is no matrix is updated by AdamW here"),
    "per_head_muon": only(False, kind=BOOL, reason="whole matrices are orthogonalised here"),
    "fp32_optimizer_states": _FP32_STATES,
    **all_idle(BOOL, "torch_adam"),
}
_SGD = {
    **_COMMON,
    **dict.fromkeys(("momentum", "dampening"), mapped(NUMBER)),
    "nesterov": mapped(BOOL),
    "maximize": only(False, kind=BOOL, reason="the loss is minimised; negate it"),
}


@dataclass(frozen=True)
class _Section:
    """The section of an optimizer that the runtime has: its keys, and DeepSpeed's defaults where those differ.

    fields: the names that keys have in `config`, if they have others.
    """

    config: type[OptimizerConfig]
    keys: Mapping[str, Key]
    defaults: Mapping[str, Any]
    fields: Mapping[str, str] = field(default_factory=dict)


_SECTIONS = {
    # Of DeepSpeed up to 0.19.6. Its weight decay is decoupled there too, and step freeze_step + 1 is the first that
    # sends signs.
    "onebitadam": _Section(
        OneBitAdamConfig,
        _ONE_BIT_ADAM,
        {"weight_decay": 0.0, "warmup_updates": 100_000},
        {"freeze_step": "warmup_updates"},
    ),
    "lion": _Section(LionConfig, _LION, {"weight_decay": 0.0, "beta2": 0.999}),
    "lamb": _Section(
        LambConfig,
        _LAMB,
        {"weight_decay": 0.0, "eps": 1e-8, "min_coeff": 0.01, "max_coeff": 10.0, "correction": "rate"},
    ),
    "sgd": _Section(SgdConfig, _SGD, {"weight_decay": 0.0}),
}


def choose_optimizer(section: Mapping[str, Any] | None, reader: Reader) -> ChosenOptimizer | None:
    """The optimizer of a section. None without a section, or if it is invalid: the reader's problems then say why."""
    if section is None:
        return None
    kind = section.get("type", "")
    lower = kind.lower()
    torch_name = next((name for name in TORCH_NAMES if name.lower() == lower), "")
    build = _BUILDERS.get(lower)
    if build is None and not torch_name:
        reason = _REFUSED.get(lower, "it is not known here")
        reader.problems.append(
            f"optimizer.type: {shown(kind)}: {reason}; expected Adam, AdamW, OneBitAdam, Lion, Lamb, Muon, SGD or "
            f"another of {_others()}"
        )
        return None
    params = section.get("params", {})
    with reader.collecting("optimizer.params"):
        return build(lower, params, reader) if build else _torch(torch_name, params, reader)
    return None


def default_optimizer() -> ChosenOptimizer:
    """The optimizer that is used if none is named: AdamW with DeepSpeed's constants."""
    return ChosenOptimizer(AdamWConfig(weight_decay=0.0, no_decay=False), _DEFAULT_LR, 0.0)


def _others() -> str:
    return ", ".join(f"torch.optim.{name}" for name in TORCH_NAMES if name.lower() not in _BUILDERS)


def _adam(kind: str, params: Mapping[str, Any], reader: Reader) -> ChosenOptimizer:
    """Adam or AdamW. As in DeepSpeed, adam_w_mode is true by default, also for the type Adam."""
    values = reader.read(_ADAM, params, "optimizer.params.")
    decoupled = kind == "adamw" or values.get("adam_w_mode", True)
    # The default weight decay of torch's AdamW is 0.01, that of DeepSpeed's own is 0.
    usual = 0.01 if values.get("torch_adam") and decoupled else 0.0
    decay = float(values.get("weight_decay", usual))
    beta1, beta2 = values.get("betas", (0.9, 0.999))
    eps = float(values.get("eps", 1e-8))
    config: OptimizerConfig
    corrects = values.get("bias_correction", True)
    if values.get("amsgrad"):
        if not corrects:
            reader.refuse("optimizer.params.bias_correction", "amsgrad corrects the bias, found False; leave one out")
        arguments = {"betas": (beta1, beta2), "eps": eps, "amsgrad": True}
        config = TorchConfig("AdamW" if decoupled else "Adam", arguments, decay, no_decay=False)
    else:
        kind_of = AdamWConfig if decoupled else AdamConfig
        config = kind_of(beta1, beta2, eps, decay, no_decay=False, corrects_bias=corrects)
    return ChosenOptimizer(config, float(values.get("lr", _DEFAULT_LR)), decay)


def _own(kind: str, params: Mapping[str, Any], reader: Reader) -> ChosenOptimizer:
    """An optimizer of _SECTIONS."""
    section = _SECTIONS[kind]
    constants = dict(section.defaults)
    values = reader.read(section.keys, params, "optimizer.params.")
    lr = float(values.pop("lr", _DEFAULT_LR))
    if "betas" in values:
        constants["beta1"], constants["beta2"] = values.pop("betas")
    if not values.pop("bias_correction", True):
        constants["correction"] = "none"
    for name, value in values.items():
        constants[section.fields.get(name, name)] = float(value) if section.keys[name].kind == NUMBER else value
    return ChosenOptimizer(section.config(**constants, no_decay=False), lr, constants["weight_decay"])


def _muon(_kind: str, params: Mapping[str, Any], reader: Reader) -> ChosenOptimizer:
    """Muon, and AdamW for what is no matrix, with the defaults of DeepSpeed 0.19.8."""
    values: dict[str, Any] = {"weight_decay": 0.0, "eps": 1e-10, **reader.read(_MUON, params, "optimizer.params.")}
    lr = values.pop("lr", None)
    usual = {"muon_lr": 0.02, "adam_lr": 3e-4} if lr is None else {"muon_lr": lr, "adam_lr": lr}
    muon, adam = (float(values.pop(name, rate)) for name, rate in usual.items())
    beta1, beta2 = values.pop("betas", (0.9, 0.95))
    gram = values.pop("ns_method", "gram") == "gram"
    constants: dict[str, Any] = {name: float(value) for name, value in values.items()}
    constants |= {"lr_scaling": "original", "ns_dtype": "fp32" if gram else "bf16", "no_decay": False}
    ratio = adam / muon if muon else 1.0
    if gram:
        reader.notes.append("Muon: Newton-Schulz steps are computed in fp32, by DeepSpeed's ns_method gram in fp16")
    config = MuonConfig(adamw_lr_ratio=ratio, beta1=beta1, beta2=beta2, **constants)
    return ChosenOptimizer(config, muon, config.weight_decay)


def _torch(name: str, params: Mapping[str, Any], reader: Reader) -> ChosenOptimizer:
    accepted = torch_arguments(name)
    table = {**_COMMON, **{argument: mapped(ANY) for argument in accepted if argument not in TORCH_OURS}}
    values = reader.read(table, params, "optimizer.params.")
    lr = float(values.pop("lr", torch_default(name, "lr")))
    decay = float(values.pop("weight_decay", torch_default(name, "weight_decay")))
    config = TorchConfig(name, values, decay, no_decay=False)
    return ChosenOptimizer(config, lr, decay)


_BUILDERS: dict[str, Callable[[str, Mapping[str, Any], Reader], ChosenOptimizer]] = {
    "adam": _adam,
    "adamw": _adam,
    "muon": _muon,
    **dict.fromkeys(_SECTIONS, _own),
}


def torch_arguments(name: str) -> tuple[str, ...]:
    """The arguments of a class of torch.optim, without `params`."""
    return tuple(argument for argument in _signature(name) if argument not in ("self", "params"))


def torch_default(name: str, argument: str) -> Any:
    """torch's default for an argument; 0 if the class has no such argument."""
    found = _signature(name).get(argument)
    return 0.0 if found is None else found.default


def _signature(name: str) -> Mapping[str, inspect.Parameter]:
    import torch  # imported here: a command that only reads a configuration of Adam needs no torch

    return inspect.signature(getattr(torch.optim, name).__init__).parameters
