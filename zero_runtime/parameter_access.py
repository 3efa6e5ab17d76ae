"""Notices a read of a module's parameter (`module.weight`) while nothing has declared that it is about to be read.

[Note: reads outside the owner]
torch does not check a released storage: a matrix product of it raises, but an addition crashes the process, and a copy
that is merely stale (after a step) gives wrong numbers without a word. So the table in which a module looks its
parameters up is replaced by one that asks first: inside a running forward or backward the unit is gathered in time,
elsewhere the read is an error that names the parameter. Reads that go around the attribute (`parameters()`,
`named_parameters()`, a reference kept from before) are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zero_runtime.unit import Unit

OnRead = Callable[[Unit, nn.Parameter], None]


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's own parameters by name; looking one up tells `on_read` unless its unit is in use already.

    Copies and pickles are plain dictionaries, and to make one is to read every value.
    """

    def __init__(self, plain: dict[str, nn.Parameter | None], units: dict[str, Unit], on_read: OnRead) -> None:
        super().__init__(plain)
        self._units = units
        self._on_read = on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        unit = self._units.get(name)
        if unit is not None and param is not None and not unit.uses:
            self._on_read(unit, param)
        return param

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        return dict, ({name: self[name] for name in self},)


def watch_parameters(model: nn.Module, units: Iterable[Unit], on_read: OnRead) -> None:
    """Put a watching table into every module that registers a parameter of the units."""
    owner = {id(param): unit for unit in units for param in unit.params}
    for module in model.modules():
        table = module._parameters
        watched = {name: owner[id(param)] for name, param in table.items() if id(param) in owner}
        if watched:
            module._parameters = WatchedParameters(table, watched, on_read)


def unwatch_parameters(model: nn.Module) -> None:
    """Give every module its plain table back."""
    for module in model.modules():
        if isinstance(module._parameters, WatchedParameters):
            module._parameters = dict(module._parameters)
