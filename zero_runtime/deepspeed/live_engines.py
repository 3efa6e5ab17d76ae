"""The engines of this process. DeepSpeed's functions on parameters are not told which engine owns them."""

from __future__ import annotations

from typing import NamedTuple, Protocol
from weakref import WeakSet

from torch import nn

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


def remove_engine(engine: LiveEngine) -> None:
    """Its parameters are found no more. Idempotent."""
    _LIVE.discard(engine)


def owned(param: nn.Parameter) -> OwnedParameter | None:
    """The runtime that owns the parameter; None if no engine does."""
    for engine in _LIVE:
        for unit in engine.runtime.units:
            for segment, own in unit.placed():
                if own is param:
                    return OwnedParameter(engine.runtime, segment.name)
    return None
