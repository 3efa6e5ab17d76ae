"""The engines of this process. DeepSpeed's functions on parameters are not told which engine owns them."""

from __future__ import annotations

from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from zero_runtime.deepspeed.sharded_names import name_as_sharded, name_as_whole
from zero_runtime.errors import CallOrderError
from zero_runtime.runtime import ZeroRuntime


class LiveEngine(Protocol):
    """An engine, as the owner of parameters."""

    runtime: ZeroRuntime

    def destroy(self) -> None: ...


class OwnedParameter(NamedTuple):
    """A parameter that a runtime owns, by its name there."""

    runtime: ZeroRuntime
    name: str


_LIVE: WeakSet[LiveEngine] = WeakSet()
_LOSSES: WeakKeyDictionary[object, ref[torch.Tensor]] = WeakKeyDictionary()  # the last one of each


def add_engine(engine: LiveEngine) -> None:
    """Let parameters of the engine be found from now on, until it is removed or deleted."""
    _LIVE.add(engine)
    for unit in engine.runtime.units:
        for segment, param in unit.parameters.placed():
            if engine.runtime.plan.keeps_full_params:
                name_as_whole(param)
            else:
                name_as_sharded(param, unit.full_shapes[segment.name], is_open=True)


def remove_engine(engine: LiveEngine) -> None:
    """Its parameters are found no more. Idempotent."""
    _LIVE.discard(engine)
    for unit in engine.runtime.units:
        for param in unit.params:
            name_as_whole(param)


def destroy_engine_of(model: nn.Module) -> bool:
    """Destroy the engine of the model, if there is one and the model keeps its weights; whether it was.

    Each rank comes to the same end: it depends on the plan alone, and the hooks on a model keep its engine alive.
    """
    engine = next((one for one in _LIVE if one.runtime.model is model), None)
    if engine is None or not _leaves_weights(engine.runtime):
        return False
    engine.destroy()
    return True


def _leaves_weights(runtime: ZeroRuntime) -> bool:
    """Whether parameters are whole on each rank when the runtime is closed; see [Note: the model afterwards]."""
    alone = runtime.collectives.shard_count == 1 and not any(unit.parameters.params_offloaded for unit in runtime.units)
    return runtime.collectives.tensor_degree == 1 and (runtime.plan.keeps_full_params or alone)


def any_engine() -> LiveEngine | None:
    """One of the engines of this process; None if there is none."""
    return next(iter(_LIVE), None)


def claim_loss(engine: object, loss: torch.Tensor) -> None:
    """Remember that the engine runs the backward of `loss`; CallOrderError if another engine had it.

    A backward gives gradients to every engine that the loss went through, so two would count them twice.
    """
    if any(one is not engine and seen() is loss for one, seen in _LOSSES.items()):
        raise CallOrderError(
            "engine.backward: expected a loss that no other engine had the backward of, found one whose gradients were "
            "given to both engines then, and would count twice; make one engine of a module that holds both models, "
            "with a parameter group for each"
        )
    _LOSSES[engine] = ref(loss)


def owned(param: nn.Parameter) -> OwnedParameter | None:
    """The runtime that owns the parameter; None if no engine does."""
    for engine in _LIVE:
        for unit in engine.runtime.units:
            for segment, own in unit.parameters.placed():
                if own is param:
                    return OwnedParameter(engine.runtime, segment.name)
    return None
