"""Reads a pickle as data: every class that it names is replaced by one stand-in class, which stores its arguments.

[Note: no class is changed]
A pickle can call anything that it names, and can set attributes of any object on its stack, including classes: if it
could reach `pathlib.Path`, it could change that class for the entire process. So it must not reach any other class. It
can build only stand-ins, plain numbers, strings and containers; a stand-in has two slots, and setting state on its
class raises an error.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO


class StandIn:
    """Replaces an instance of a class that a pickle names; holds the arguments and the state that the pickle gave."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **_named: Any) -> StandIn:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """One attribute of a pickled data class. ValueError if it is missing."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"no {name!r} where one belongs")
        return self.state[name]

    def has(self, name: str) -> bool:
        """Whether the pickled object has this attribute."""
        return isinstance(self.state, dict) and name in self.state


def field(found: Any, name: str) -> Any:
    """An attribute of an object that should be a stand-in. ValueError if it is not one or has no such attribute."""
    if not isinstance(found, StandIn):
        raise ValueError(f"a {type(found).__name__} where an object with {name!r} belongs")
    return found.field(name)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, allows: Callable[[str, str], bool]) -> None:
        super().__init__(file)
        self._allows = allows

    def find_class(self, module: str, name: str) -> type[StandIn]:
        if not self._allows(module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is none of the plain classes of this format")
        return StandIn


def read_pickle(file: BinaryIO, allows: Callable[[str, str], bool]) -> Any:
    """Load a pickle; see [Note: no class is changed]. `allows(module, name)`: whether it may name this class.

    A damaged pickle may raise any error: MemoryError, UnicodeDecodeError, RecursionError and others.
    """
    return _Unpickler(file, allows).load()
