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

# Attributes of the collectives of an engine.
ANSWERS = {
    "get_data_parallel_rank": "data_rank",
    "get_data_parallel_world_size": "data_world",
    "get_model_parallel_rank": "tensor_rank",
    "get_model_parallel_world_size": "tensor_degree",
    "get_tensor_model_parallel_rank": "tensor_rank",
    "get_tensor_model_parallel_world_size": "tensor_degree",
    "get_sequence_parallel_rank": "sequence_rank",
    "get_sequence_parallel_world_size": "sequence_degree",
    "get_sequence_data_parallel_rank": "data_rank",
    "get_sequence_data_parallel_world_size": "data_world",
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
    if public in ANSWERS:
        return partial(_ask, ANSWERS[public])
    if "expert" in public:
        raise AttributeError(f"{__name__}.{public} is not here: experts are not here")
    raise missing(__name__, public)
