"""Marks modules whose parameters are one unit, gathered whole on every rank when the module is called.

DeepSpeed calls them ZeRO-3 leaf modules. They are for modules in which ranks or steps take different ways, such as a
list of experts or of optional towers. The mark is read by `initialize`, see unit_planner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from zero_runtime.deepspeed.live_engines import owned
from zero_runtime.deepspeed.schema import in_list
from zero_runtime.errors import PlanError
from zero_runtime.unit_planner import ONE_UNIT, is_one_unit

Classes = Sequence[type[nn.Module] | str]  # types, or names of classes with or without their module


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return is_one_unit(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of the model."""
    return [module for module in model.modules() if is_one_unit(module)]


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter of an engine is inside a marked module."""
    found = owned(model)
    marked = [] if found is None else get_z3_leaf_modules(found.runtime.model)
    return any(param is model for module in marked for param in module.parameters())


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module, or take its mark away, before `initialize`."""
    if any(owned(param) for param in model.parameters()):
        raise PlanError("z3 leaf modules: expected a model before initialize, which reads the marks, found an engine's")
    setattr(model, ONE_UNIT, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes and return them; ValueError if there is none."""
    return _set_by_class(model, leaf_module_classes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of the modules of these classes away and return them; ValueError if there is none."""
    return _set_by_class(model, leaf_module_classes, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `named_modules`. Returns them and the names without a module (or ValueError)."""
    return _set_by_name(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same by the ends of their names."""
    return _set_by_name(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def mark_leaf_modules(model: nn.Module, section: Mapping[str, Any]) -> list[str]:
    """Mark what zero_optimization.leaf_module describes, by texts. Returns notes on what the model lacks."""
    absent = [name for name in in_list(section.get("classes", [])) if not set_z3_leaf_modules(model, [name], False)]
    absent += set_z3_leaf_modules_by_name(model, in_list(section.get("names", [])), raise_if_not_found=False)[1]
    suffixes = in_list(section.get("name_suffixes", []))
    absent += set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)[1]
    return [f"zero_optimization.leaf_module: the model has no module {', '.join(absent)}"] if absent else []


def _set_by_class(model: nn.Module, classes: Classes, raises: bool, *, flag: bool) -> list[nn.Module]:
    types = tuple(one for one in classes if isinstance(one, type))
    found = [module for module in model.modules() if isinstance(module, types) or _names_of(module) & {*classes}]
    _set(found, flag)
    if not found and raises:
        raise ValueError(f"expected modules of the classes {list(classes)} in {type(model).__name__}, found none")
    return found


def _names_of(module: nn.Module) -> set[type[nn.Module] | str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _set_by_name(
    model: nn.Module, wanted: Sequence[str], flag: bool, raises: bool, fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    found = {name: module for one in wanted for name, module in named.items() if fits(name, one)}
    absent = [one for one in wanted if not any(fits(name, one) for name in named)]
    _set(found.values(), flag)
    if absent and raises:
        raise ValueError(f"expected modules named {absent} in {type(model).__name__}, found none")
    return list(found.values()), absent


def _set(modules: Iterable[nn.Module], flag: bool) -> None:
    for module in modules:
        set_z3_leaf_module(module, flag)
