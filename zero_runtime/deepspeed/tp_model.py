"""tp_model_init: remembers that a model is to be divided between ranks, which `initialize` then does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zero_runtime.deepspeed.json_text import load
from zero_runtime.errors import PlanError

_KEY, _SIZE = "tensor_parallel", "autotp_size"


class _Asked(NamedTuple):
    size: int
    dtype: torch.dtype


# DeepSpeed remembers one size for the process; here each model has its own, also inside of a wrapper such as PEFT's.
_ASKED: WeakKeyDictionary[nn.Module, _Asked] = WeakKeyDictionary()


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, tp_group: Any = None
) -> nn.Module:
    """Returns `model`, whose layers `initialize` will divide between `tp_size` consecutive ranks.

    dtype: that of the configuration given to `initialize`. `config` has no effect, as in DeepSpeed.
    """
    if tp_group is not None:
        raise PlanError("tp_model_init: tp_group: expected none: groups are consecutive ranks; leave it out")
    asked = _Asked(tp_size, dtype)
    if _ASKED.setdefault(model, asked) != asked:
        raise PlanError(f"tp_model_init: expected one call for a model, found {_ASKED[model]} and {asked}")
    return model


def with_tensor_parallel(model: nn.Module, config: Mapping[str, Any] | str | Path) -> Mapping[str, Any] | str | Path:
    """The configuration with the size that tp_model_init was given for the model or a part of it.

    PlanError if the configuration has another size or dtype.
    """
    asked = next((_ASKED[module] for module in model.modules() if module in _ASKED), None)
    if asked is None:
        return config
    values = load(config)
    section = values.get(_KEY, {})
    if section.get(_SIZE, asked.size) != asked.size:
        raise PlanError(f"{_KEY}.{_SIZE}: expected {asked.size}, as tp_model_init says, found {section[_SIZE]}")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if values.get(name, {}).get("enabled") is True and dtype != asked.dtype:
            raise PlanError(f"{name}.enabled: expected the dtype of tp_model_init, {asked.dtype}; give both the same")
    return {**values, _KEY: {**section, _SIZE: asked.size}}
