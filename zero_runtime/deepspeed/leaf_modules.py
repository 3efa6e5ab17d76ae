"""Marks modules whose parameters are one unit, gathered whole on every rank when the module is called.

DeepSpeed calls them ZeRO-3 leaf modules. They are for modules in which ranks or steps take different ways, such as a
list of experts or of optional towers. The mark is read by `initialize`, see unit_planner.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from zero_runtime.deepspeed.live_engines import owned
from zero_runtime.deepspeed.schema import in_list
from zero_runtime.errors import PlanError
from zero_runtime.unit_planner import ONE_UNIT

Classes = Sequence[type[nn.Module] | str]  # types, or names of classes with or without their module


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes and return them; ValueError if there is none."""
    types = tuple(one for one in leaf_module_classes if isinstance(one, type))
    wanted = {*leaf_module_classes}
    found = [module for module in model.modules() if isinstance(module, types) or _names_of(module) & wanted]
    _mark(found)
    if not found and raise_if_not_found:
        classes = list(leaf_module_classes)
        raise ValueError(f"expected modules of the classes {classes} in {type(model).__name__}, found none")
    return found


def mark_leaf_modules(model: nn.Module, section: Mapping[str, Any]) -> list[str]:
    """Mark what zero_optimization.leaf_module describes, by texts. Returns notes on what the model lacks."""
    absent = [name for name in in_list(section.get("classes", [])) if not set_z3_leaf_modules(model, [name], False)]
    named = dict(model.named_modules())
    for key, fits in (("names", str.__eq__), ("name_suffixes", str.endswith)):
        for wanted in in_list(section.get(key, [])):
            found = [module for name, module in named.items() if fits(name, wanted)]
            _mark(found)
            absent += [] if found else [wanted]
    return [f"zero_optimization.leaf_module: the model has no module {', '.join(absent)}"] if absent else []


def _names_of(module: nn.Module) -> set[type[nn.Module] | str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _mark(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if any(owned(param) for param in module.parameters()):
            raise PlanError(
                "z3 leaf modules: expected a model before initialize, which reads the marks, found an engine's"
            )
        setattr(module, ONE_UNIT, True)
