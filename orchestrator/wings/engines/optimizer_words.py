"""The point's optimizer in the words of torch.optim, for what builds it and for what writes it into a script."""

from __future__ import annotations

from typing import Any

from orchestrator.config.schema import RunConfig
from zero_runtime.optim.configs import AdamConfig, AdamWConfig, SgdConfig, TorchConfig


def optimizer_words(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """The class of torch.optim and its arguments besides the groups; fused where FSDP2 has that too.

    The point's optimizer is one of OPTIMIZERS in limits.py.
    """
    rule, lr = config.optimizer.rule, config.optimizer.lr
    if isinstance(rule, AdamWConfig):
        name = "Adam" if isinstance(rule, AdamConfig) else "AdamW"
        return name, {"lr": lr, "betas": (rule.beta1, rule.beta2), "eps": rule.eps, "fused": True}
    if isinstance(rule, SgdConfig):
        constants = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
        return "SGD", {"lr": lr, **constants, "foreach": True}  # its fused form takes no DTensors
    assert isinstance(rule, TorchConfig)
    return rule.class_name, {"lr": lr, **rule.arguments}
