"""Declares the modules that some ranks skip in some batches, such as a tower for images.

A gather needs every rank of a shard group. So the units of a declared module are read by each call of the model, on
every rank: gathered at its beginning, before the module is reached, released at its end, and gathered again at the
beginning of its backward. A rank that skips the module has no gradients for it, which count as zero. The price is
memory: the declared modules are whole during the forward and, on ranks that skip them, during the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.parameter_reads import refuse_owned
from zero_runtime.unit import Unit

_DECLARED: WeakSet[nn.Module] = WeakSet()  # of this process; a model does not know yet which runtime will own it


def optional_modules(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Declare that ranks may skip these modules of the model in any batch.

    Every rank calls it with the same modules, before `initialize` or ZeroRuntime; PlanError if that is too late or the
    model has no such module. It has an effect where parameters are sharded.
    """
    refuse_owned(model)
    declared, known = list(modules), set(model.modules())
    for module in declared:
        if module not in known:
            raise PlanError(
                f"optional_modules: expected modules of the {type(model).__name__}, found a {type(module).__name__} "
                "that is none of them"
            )
    _DECLARED.update(declared)


def optional_units(model: nn.Module, units: Iterable[Unit]) -> list[Unit]:
    """The units with a module inside a declared one of the model."""
    inside = {part for module in model.modules() if module in _DECLARED for part in module.modules()}
    return [unit for unit in units if not inside.isdisjoint(unit.modules)]
