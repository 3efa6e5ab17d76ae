"""A runtime without an optimizer: the model's parameters are frozen, so that units have weights and nothing else."""

from __future__ import annotations

from torch import nn

from zero_runtime.errors import CallOrderError
from zero_runtime.limits import Broken, ConfigError
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.plan import ZeroPlan
from zero_runtime.wire import EXACT, Wire


def begin_inference(model: nn.Module, plan: ZeroPlan, offload: OffloadPlan, wire: Wire = EXACT) -> None:
    """Freeze the model's parameters; nothing else of a runtime needs to know that they are not trained.

    ConfigError, before the model is changed, if the plan or the offload is about states that inference does not have.
    """
    plan.check_inference()
    wire.check_inference()
    if offload.optimizer not in (Tier.DEVICE, offload.params):
        rule = "inference has no optimizer states to offload: expected offload.params alone"
        fixes = ("offload=none",) if plan.keeps_full_params else (f"offload.params={offload.optimizer}", "offload=none")
        raise ConfigError([Broken(rule, f"offload.optimizer={offload.optimizer}", fixes)])
    model.requires_grad_(False)


def refuse_training(call: str) -> None:
    """Raise CallOrderError: `call` needs an optimizer, which a runtime for inference does not have."""
    raise CallOrderError(
        f"{call}: expected a runtime that trains, found one for inference, whose parameters are frozen; give "
        "ZeroRuntime an optimizer (the drop-in: initialize it with an optimizer)"
    )
