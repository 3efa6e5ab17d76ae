"""zero_runtime: ZeRO stages 0 to 3 over torch.distributed, defined by one table of lifetimes (plan.py).

The files here, `optim`, `activations` and `watch` are the way of one parameter. The folders `offload`, `parallel`,
`generation`, `quantised`, `checkpoint`, `predict`, `profile`, `same_host` and `deepspeed` are wings, which may be
skipped at first: what is here reaches them by the names in wings.py alone.

Attributes import their modules lazily, so the pure parts (plan, layout, memory model) can be imported without torch.

`zero_runtime/kernels` is a link to the folder `kernels/` at the top. Hugging Face publishes a package with the name
`kernels`, which transformers imports if it is installed: an installed package of ours with that name would overwrite
its files, and a checkout would shadow it. A module with a `__path__` of its own would work without a link, but would
hide the sources from editors, mypy and setuptools.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from zero_runtime.import_finders import OtherEngineFinder, ShortNames

_HOME = {
    "AdamConfig": "optim.configs",
    "AdamWConfig": "optim.configs",
    "Constant": "optim.lr_schedule",
    "Cosine": "optim.lr_schedule",
    "LRRangeTest": "optim.lr_schedule",
    "LambConfig": "optim.configs",
    "LionConfig": "optim.configs",
    "LrSchedule": "optim.lr_schedule",
    "MixedPrecision": "precision",
    "OneCycle": "optim.lr_schedule",
    "ParamGroup": "optim.groups",
    "Rates": "optim.lr_schedule",
    "RuntimeSettings": "settings",
    "SgdConfig": "optim.configs",
    "StepReport": "step_report",
    "TorchConfig": "optim.configs",
    "WarmupCosineLR": "optim.lr_schedule",
    "WarmupDecayLR": "optim.lr_schedule",
    "WarmupLR": "optim.lr_schedule",
    "ZeroPlan": "plan",
    "optional_modules": "skipped_modules",
    "parameters_on_meta": "initial_values",
    "ZeroRuntime": "runtime",
    "add_config_arguments": "deepspeed.arguments",
    "get_accelerator": "deepspeed.accelerator",
    "init_distributed": "deepspeed.entry",
    "initialize": "deepspeed.entry",
    "tp_model_init": "deepspeed.tp_model",
}

__all__ = sorted(_HOME)
# DeepSpeed's other names, and its modules in deepspeed/: `zero_runtime.zero.Init` works without an import of its own.
_DEEPSPEED = {
    "DeepSpeedConfig": "deepspeed.runtime.config",
    "DeepSpeedConfigError": "deepspeed.runtime.config",
    "DeepSpeedEngine": "deepspeed.runtime.engine",
    "OnDevice": "deepspeed.on_device",
    "log_dist": "deepspeed.utils.logging",
    "logger": "deepspeed.utils.logging",
}
_ABSENT = "deepspeed.absent"  # what to do instead of DeepSpeed's other names
_MODULES = ("accelerator", "checkpointing", "comm", "ops", "utils", "zero")

sys.meta_path.insert(0, ShortNames((*_MODULES, "integrations")))
sys.meta_path.insert(0, OtherEngineFinder())  # it hears of DeepSpeed's engine, and finds nothing itself


def __getattr__(name: str) -> Any:
    if name == "__version__":  # the version of the installed distribution; an uninstalled checkout has none
        from importlib import metadata  # here, so that the answer to a typo does not wait for its import

        try:
            return metadata.version("zero-lab")
        except metadata.PackageNotFoundError:
            return "0+checkout"
    if name in _MODULES:
        return import_module(f"zero_runtime.{name}")
    home = _HOME.get(name) or _DEEPSPEED.get(name)
    if home is None:
        absent = import_module(f"zero_runtime.{_ABSENT}")
        raise absent.missing("zero_runtime", name)
    return getattr(import_module(f"zero_runtime.{home}"), name)
