"""DeepSpeed's `utils.groups`: how many ranks share a model, and which of them this rank is.

The answers are those of an engine of this process, or of the process group before there is one. Each name may begin
with an underscore, as scripts write it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zero_runtime.deepspeed import comm
from zero_runtime.deepspeed.absent import missing
from zero_runtime.deepspeed.live_engines import any_engine
from zero_runtime.errors import PlanError

_AXES = {"data": "data", "sequence_data": "data", "sequence": "sequence", "model": "tensor", "tensor_model": "tensor"}
# Attributes of the collectives of an engine.
_ANSWERS = {f"get_{kind}_parallel_rank": f"{axis}_rank" for kind, axis in _AXES.items()} | {
    f"get_{kind}_parallel_world_size": "data_world" if axis == "data" else f"{axis}_degree"
    for kind, axis in _AXES.items()
}


def get_data_parallel_group() -> Any:
    """torch's group of the data-parallel ranks, which are all ranks; PlanError if the engine divides the model."""
    ranks = _ask("data_world")
    if ranks != comm.get_world_size():
        raise PlanError(f"groups: expected all {comm.get_world_size()} ranks to be data-parallel, found {ranks}")
    return comm.group.WORLD


def _ask(attribute: str) -> int:
    engine = any_engine()
    if engine is not None:
        return int(getattr(engine.runtime.collectives, attribute))
    alone = {"data_rank": comm.get_rank, "data_world": comm.get_world_size}
    return int(alone[attribute]()) if attribute in alone else int(attribute.endswith("degree"))


def __getattr__(name: str) -> Callable[[], Any]:
    public = name.removeprefix("_")
    if public == get_data_parallel_group.__name__:
        return get_data_parallel_group
    if public in _ANSWERS:
        return partial(_ask, _ANSWERS[public])
    raise missing(__name__, public)
