"""Keeps torch.compile out of the runtime's hooks on a model that was compiled before."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from zero_runtime.errors import some
from zero_runtime.world import own_rank

log = logging.getLogger(__name__)
Hook = Callable[..., Any]


def untraced_if_compiled(model: nn.Module) -> Callable[[Hook], Hook]:
    """A function that makes a hook one into which dynamo does not trace, with a warning; the hook itself is returned if
    no part of the model is compiled."""
    dynamo = sys.modules.get("torch._dynamo")  # what has compiled a model has imported it, and importing it takes long
    compiled = [
        name or type(model).__name__
        for name, module in (model.named_modules() if dynamo is not None else ())
        if module._compiled_call_impl is not None or isinstance(module, dynamo.OptimizedModule)  # type: ignore[union-attr]
    ]
    if dynamo is None or not compiled:
        return lambda hook: hook
    if own_rank() == 0:
        log.warning(
            "compiled: %s: the runtime's hooks break the graph at each unit, so expect no speed from it; it costs the "
            "compilation: leave torch.compile out",
            some(compiled),
        )
    # Tracing into a hook would reach the collectives, which dynamo cannot follow.
    disable: Callable[[Hook], Hook] = dynamo.disable
    return disable
