"""Detects reads of a module's parameter (`module.weight`) that no call has announced.

The dictionary in which a module looks up its parameters is replaced by one that calls `on_read` first. Inside a running
forward or backward the unit is then gathered in time, and the call that read it is recorded for the backward. Reads
that bypass the attribute (`parameters()`, a reference from before) are checked by the guard in guarded_parameter.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.guarded_parameter import SAVE_BEFORE, GuardedParameter, ParameterGuard
from zero_runtime.unit import Unit

OnRead = Callable[[Unit], None]


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's own parameters by name; looking one up calls `on_read` unless its unit is already in use.

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


def refuse_owned(model: nn.Module) -> None:
    """PlanError if an open runtime owns the model, or a closed one left it without its values."""
    if any(isinstance(module._parameters, WatchedParameters) for module in model.modules()):
        raise PlanError(
            "model: expected one that no runtime owns, found one that is in use, also if its engine was deleted; call "
            "engine.destroy() (runtime.close) on every rank before that, or, where a rank has only its shard, save "
            "them (engine.save_checkpoint), make the model anew and load them"
        )
    for name, param in model.named_parameters():
        if isinstance(param, GuardedParameter):
            raise PlanError(
                f"model: expected parameters with values, found that of {name!r} with a runtime that owns it, or that "
                f"was closed when this rank had only a part of it; {SAVE_BEFORE}"
            )


def watch_parameters(model: nn.Module, units: Iterable[Unit], on_read: OnRead) -> None:
    """Give every module that registers a parameter of the units a watching dictionary, and every unit a guard."""
    owner = {id(param): unit for unit in units for param in unit.params}
    for module in model.modules():
        table = module._parameters
        watched = {name: owner[id(param)] for name, param in table.items() if id(param) in owner}
        if watched:
            module._parameters = WatchedParameters(table, watched, on_read)
    for unit in units:
        unit.guard_with(ParameterGuard(unit, partial(on_read, unit)))


def unwatch_parameters(model: nn.Module, units: Iterable[Unit]) -> None:
    """Restore every module's plain dictionary and every parameter's plain class."""
    for module in model.modules():
        if isinstance(module._parameters, WatchedParameters):
            module._parameters = dict(module._parameters)
    for unit in units:
        unit.guard_with(None)
