"""The end of a runtime: what the model keeps, what is freed, and an object whose methods raise afterwards.

[Note: the model afterwards]
Whoever closes a runtime may save the model next, or train it with another one. Parameters whose full values this rank
has become tensors of their own. Those of which it has a shard or a slice stay guarded: reading one raises its name,
because an empty or stale tensor would be saved without a word.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from inspect import isfunction
from typing import Any, NoReturn

from zero_runtime.errors import CallOrderError, brief
from zero_runtime.optim.sharded import ShardedOptimizer
from zero_runtime.state_tier import StateTier
from zero_runtime.unit import Unit

log = logging.getLogger(__name__)


def hand_back(units: list[Unit], tier: StateTier, optimizer: ShardedOptimizer) -> None:
    """Give the model its parameters, see [Note: the model afterwards], and free everything else. Empties `units`.

    Gathers full copies that the plan keeps and that an offloaded update left stale; every rank then takes part. A rank
    that handles an error gathers nothing, since the others do not come to it (see [Note: failed ranks] in world.py).
    """
    try:
        for unit in units:
            unit.gradients.free()
        if sys.exc_info()[0] is None:
            _complete(units, optimizer)
    finally:
        tier.close()  # before the rest: it waits for updates under way, which use the units and the optimizer
        optimizer.free()
        for unit in units:
            unit.free()
        units.clear()


def _complete(units: list[Unit], optimizer: ShardedOptimizer) -> None:
    """Make full copies current. After a failed update some cannot be: the step has raised its error already."""
    try:
        optimizer.forget_step()  # it may have been guessed, and would wait for gradients that never come
        for unit in units:
            unit.complete()
    except Exception as error:
        log.warning("parameters that could not be gathered raise when they are read: %s", brief(error))


def retire(closed: Any, told: str, *, kept: Collection[str]) -> None:
    """Let every public method of the object, except those named in `kept`, raise CallOrderError from now on.

    told: the message, after the method's name. Attributes and properties stay. Idempotent.
    """
    kind = type(closed)
    names = [name for name in dir(kind) if name == "__call__" or not name.startswith("_")]
    methods = [name for name in names if name not in kept and isfunction(getattr(kind, name))]
    closed.__class__ = type(kind.__name__, (kind,), {name: _refusal(name, told) for name in methods})


def _refusal(name: str, told: str) -> Callable[..., NoReturn]:
    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise CallOrderError(f"{'a call' if name == '__call__' else name}: {told}")

    return refused
