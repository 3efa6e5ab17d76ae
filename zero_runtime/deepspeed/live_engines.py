"""The engines of this process. DeepSpeed's functions on parameters are not told which engine owns them."""

from __future__ import annotations

from typing import NamedTuple, Protocol
from weakref import WeakSet

from torch import nn

from zero_runtime.deepspeed.sharded_names import name_as_sharded, name_as_whole
from zero_runtime.runtime import ZeroRuntime


class LiveEngine(Protocol):
    """The attribute of an engine by which the owner of a parameter is found."""

    runtime: ZeroRuntime


class OwnedParameter(NamedTuple):
    """A parameter that a runtime owns, by its name there."""

    runtime: ZeroRuntime
    name: str


_LIVE: WeakSet[LiveEngine] = WeakSet()


def add_engine(engine: LiveEngine) -> None:
    """Let parameters of the engine be found from now on, until it is removed or deleted."""
    _LIVE.add(engine)
    for unit in engine.runtime.units:
        for segment, param in unit.placed():
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


def any_engine() -> LiveEngine | None:
    """One of the engines of this process; None if there is none."""
    return next(iter(_LIVE), None)


def owned(param: nn.Parameter) -> OwnedParameter | None:
    """The runtime that owns the parameter; None if no engine does."""
    for engine in _LIVE:
        for unit in engine.runtime.units:
            for segment, own in unit.placed():
                if own is param:
                    return OwnedParameter(engine.runtime, segment.name)
    return None
