"""DeepSpeed's `checkpointing`: recomputation of activations, by torch.utils.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_runtime.deepspeed.absent import missing
from zero_runtime.deepspeed.json_text import load as load_json
from zero_runtime.deepspeed.keys import IN_CPU, RECOMPUTED
from zero_runtime.deepspeed.schema import without_effect
from zero_runtime.wings import ACTIVATIONS_ON_HOST, load

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
_HOST: dict[str, Any] = {}  # "memory": the host's, None until it is needed; empty if inputs stay on the device


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`; its activations are computed again in backward instead of kept, and with
    checkpoint_in_cpu its inputs are kept in host memory."""
    if not _HOST:
        return torch_checkpoint(function, *args, use_reentrant=False)
    if _HOST["memory"] is None:
        _HOST["memory"] = load(ACTIVATIONS_ON_HOST)(torch.device("cuda", torch.cuda.current_device()), None)
    block = nn.Module()
    vars(block)["forward"] = function  # a module too is called, and so are its hooks
    return _HOST["memory"].forward_of(block, recomputes=True, keeps_products=False)(*args)


def configure(mpu_: Any = None, deepspeed_config: Any = None, **switches: Any) -> None:
    """Say where `checkpoint` keeps inputs: DeepSpeed's switches, which go before the section of `deepspeed_config`.

    A warning names the switches that are on and have no effect. `initialize` reads the section of its configuration.
    """
    section = {} if deepspeed_config is None else load_json(deepspeed_config).get("activation_checkpointing") or {}
    chosen = {**section, **{name: value for name, value in switches.items() if value is not None}}
    idle = {name: name for name, value in chosen.items() if value and name not in IN_CPU}
    if lines := [*without_effect(idle, RECOMPUTED), *follow(chosen)]:
        warnings.warn(f"zero_runtime.checkpointing.configure: {'; '.join(lines)}", stacklevel=2)


def follow(section: Mapping[str, Any] | None) -> list[str]:
    """Keep inputs where the section says from now on, if there is one; a line if that changes nothing."""
    if section is None:
        return []
    asked = section.get(IN_CPU[1], section.get(IN_CPU[0]))
    _HOST.clear()  # what a graph keeps in that memory lives as long as the graph
    _HOST.update({"memory": None} if asked and torch.cuda.is_available() else {})
    return [f"{IN_CPU[0]}: a CPU keeps its activations in host memory anyway"] if asked and not _HOST else []


def is_configured() -> bool:
    """Always True: nothing needs to be configured."""
    return True


def reset() -> None:
    """Does nothing: what a call keeps is free again after its backward."""


def __getattr__(name: str) -> NoReturn:
    raise missing(__name__, name)
