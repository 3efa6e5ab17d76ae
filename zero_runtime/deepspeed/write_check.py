"""Finds writes to weights that a step would undo in silence, for scripts in which they are suspected.

Such a write goes through `param.data` to the copy that the model computes with, while the step updates the masters.
"""

from __future__ import annotations

import os

import torch

from zero_runtime.errors import ParameterReadError, some
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.state_tier import residence

VARIABLE = "ZERO_RUNTIME_CHECK_WRITES"


def check_writes(runtime: ZeroRuntime) -> None:
    """With the variable set, raise on all ranks if a weight of one is not its rounded master. A collective.

    Nothing is checked at stage 3, where such a write raises itself.
    """
    if not os.environ.get(VARIABLE) or not runtime.plan.keeps_full_params:
        return
    ranks = runtime.collectives.gather_objects(_differing(runtime))
    every = dict.fromkeys(name for names in ranks for name in names)
    if every:
        raise ParameterReadError(
            f"engine.step: expected the weights that the last step left, found others in {some(every)}, written "
            "through `data`: the step updates the masters and would undo that; write inside "
            "GatheredParameters(..., modifier_rank=0)"
        )


@torch.no_grad()
def _differing(runtime: ZeroRuntime) -> list[str]:
    found = []
    for unit in runtime.units:
        unit.wait_current()
        with residence(runtime.tier, unit):
            whole = unit.full_of(unit.weights_shard)
        with torch._C.DisableTorchFunctionSubclass():  # the guard's subject are the reads of others
            for segment, param in unit.parameters.placed():
                expected = whole[segment.name].to(unit.parameters.param_dtype).to(param.dtype)
                if not torch.allclose(param.data, expected, rtol=0, atol=0, equal_nan=True):
                    found.append(segment.name)
    return found
