"""The point's optimizer in the words of torch.optim, for what builds it and for what writes it into a script."""

from __future__ import annotations

from typing import Any

from orchestrator.config.schema import Device, RunConfig
from zero_runtime.offload_plan import Tier
from zero_runtime.optim.configs import AdamConfig, AdamWConfig, SgdConfig, TorchConfig
from zero_runtime.predict.memory.peers import FUSED, StepForm

# Copies of a group in the form foreach, counted for torch 2.14: one of each second moment, whose root is taken, unless
# it is said here. These take the gradients with their weight decay as another one.
FOREACH_COPIES, DECAY_COPIED = (
    {"SGD": 0, "Adadelta": 2, "Adagrad": 2, "Rprop": 2},
    ("SGD", "Adadelta", "NAdam", "RMSprop"),
)
LOOP_COPIES = 4  # at most: a gradient with its decay, a root, its quotient and that of the parameter before


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


def step_form(config: RunConfig, *, by_default: bool) -> StepForm:
    """How these words step, in the form that torch chooses if `by_default`: foreach on a GPU, else a loop."""
    name, words = optimizer_words(config)
    given = {} if by_default else words
    if given.get("fused"):
        return FUSED
    on_gpu = config.resources.device is Device.cuda and config.offload.optimizer is config.offload.params is Tier.DEVICE
    if given.get("foreach", on_gpu):
        return StepForm(
            "foreach", FOREACH_COPIES.get(name, 1) + (config.optimizer.rule.decay > 0 and name in DECAY_COPIED)
        )
    return StepForm("a loop over parameters", of_param=LOOP_COPIES)
