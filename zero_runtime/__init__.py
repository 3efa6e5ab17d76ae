"""zero_runtime: ZeRO stages 0 to 3 over torch.distributed, as one table of lifetimes.

Lazy: naming a thing imports its module, so that the pure parts (plan, layout, memory model) come without torch.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

_HOME = {
    "AdamConfig": "optimizers",
    "AdamWConfig": "optimizers",
    "Constant": "lr_schedule",
    "Cosine": "lr_schedule",
    "LRRangeTest": "lr_schedule",
    "LambConfig": "optimizers",
    "LionConfig": "optimizers",
    "LrSchedule": "lr_schedule",
    "MixedPrecision": "precision",
    "OneCycle": "lr_schedule",
    "ParamGroup": "param_groups",
    "Rates": "lr_schedule",
    "RuntimeSettings": "runtime",
    "SgdConfig": "optimizers",
    "StepReport": "step_report",
    "TorchConfig": "optimizers",
    "TorchSchedule": "torch_schedule",
    "WarmupCosineLR": "lr_schedule",
    "WarmupDecayLR": "lr_schedule",
    "WarmupLR": "lr_schedule",
    "ZeroPlan": "plan",
    "parameters_on_meta": "birth",
    "ZeroRuntime": "runtime",
    "init_distributed": "dropin.entry",
    "initialize": "dropin.entry",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # of the distribution; a checkout that nobody installed has none
        try:
            return metadata.version("zero-lab")
        except metadata.PackageNotFoundError:
            return "0+checkout"
    if name not in _HOME:
        raise AttributeError(f"module 'zero_runtime' has no attribute {name!r}")
    return getattr(import_module(f"zero_runtime.{_HOME[name]}"), name)
