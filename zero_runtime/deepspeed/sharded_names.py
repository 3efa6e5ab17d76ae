"""DeepSpeed's attributes of a sharded parameter, by which scripts tell it from one that is whole on every rank.

[Note: the status]
A parameter has another class while it is not in use (guarded_parameter.py). `ds_status` of that class is NOT_AVAILABLE;
of a parameter in use, and inside GatheredParameters, it is the value that is set here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import count
from math import prod

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_ids = count()


class ZeroParamStatus(Enum):
    """Whether a rank has all of a sharded parameter."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # never here: a read waits


def name_as_sharded(param: nn.Parameter, shape: Sequence[int], *, is_open: bool) -> None:
    """Give the parameter its attributes; an id that it has stays. `is_open`: its status while it is in use."""
    own = vars(param)
    own.setdefault("ds_id", next(_ids))
    own["ds_shape"] = torch.Size(shape)
    own["ds_numel"] = prod(shape)
    own["ds_status"] = ZeroParamStatus.AVAILABLE if is_open else ZeroParamStatus.NOT_AVAILABLE


def name_as_whole(param: nn.Parameter) -> None:
    """Take the attributes away. Idempotent."""
    for name in ("ds_id", "ds_shape", "ds_numel", "ds_status"):
        vars(param).pop(name, None)


def is_zero_param(param: torch.Tensor) -> bool:
    """Whether the parameter is sharded, or built inside zero.Init."""
    return hasattr(param, "ds_id")


@contextmanager
def registered_as_sharded() -> Iterator[None]:
    """Context in which every parameter that a module registers gets the attributes of one without values."""

    def hook(_module: nn.Module, _name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            name_as_sharded(param, param.shape, is_open=False)

    handle = register_module_parameter_registration_hook(hook)  # which keeps the parameter: it returns None
    try:
        yield
    finally:
        handle.remove()
