"""Notices a read of a module's parameter (`module.weight`) while nothing has declared that it is about to be read.

The table in which a module looks its parameters up is replaced by one that asks first, so that inside a running forward
or backward the unit is gathered in time, and the backward knows who read it. What goes around the attribute
(`parameters()`, a reference kept from before) meets the parameter's own guard: guarded_parameter.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from zero_runtime.guarded_parameter import ParameterGuard
from zero_runtime.unit import Unit

OnRead = Callable[[Unit], None]


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's own parameters by name; looking one up tells `on_read` unless its unit is in use already.

    Copies and pickles are plain dictionaries.
    """

    def __init__(self, plain: dict[str, nn.Parameter | None], units: dict[str, Unit], on_read: OnRead) -> None:
        super().__init__(plain)
        self._units = units
        self._on_read = on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        unit = self._units.get(name)
        if unit is not None and param is not None and not unit.uses:
            self._on_read(unit)
        return param

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        return dict, (dict(self.items()),)


def watch_parameters(model: nn.Module, units: Iterable[Unit], on_read: OnRead) -> None:
    """Put a watching table into every module that registers a parameter of the units, and a guard before each unit."""
    owner = {id(param): unit for unit in units for param in unit.params}
    for module in model.modules():
        table = module._parameters
        watched = {name: owner[id(param)] for name, param in table.items() if id(param) in owner}
        if watched:
            module._parameters = WatchedParameters(table, watched, on_read)
    for unit in units:
        unit.guard_with(ParameterGuard(unit, partial(on_read, unit)))


def unwatch_parameters(model: nn.Module, units: Iterable[Unit]) -> None:
    """Give every module its plain table back, and every parameter its plain class."""
    for module in model.modules():
        if isinstance(module._parameters, WatchedParameters):
            module._parameters = dict(module._parameters)
    for unit in units:
        unit.guard_with(None)
