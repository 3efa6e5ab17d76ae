"""Reads a pickle as data: every class that it names is one class of ours, which keeps what it is given.

[Note: no class is changed]
A pickle calls what it names, and sets attributes of whatever lies on its stack, a class too: where it reaches
`pathlib.Path`, it can change it for the whole process. So it reaches nothing that is anybody else's. What it builds are
stand-ins, plain numbers, texts and containers; a stand-in has two slots, and its class raises where it is given state.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO


class StandIn:
    """What a pickle made of one of the classes that it names: with these arguments, and this state."""

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
        """One of the attributes that a data class has written. ValueError where there is none."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"no {name!r} where one belongs")
        return self.state[name]

    def has(self, name: str) -> bool:
        """Whether it has written such an attribute."""
        return isinstance(self.state, dict) and name in self.state


def field(found: Any, name: str) -> Any:
    """An attribute of what should be a stand-in. ValueError where it is none."""
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
    """What the pickle holds; see [Note: no class is changed]. `allows(module, name)`: the classes that it may name.

    Damaged, it raises what it likes: MemoryError, UnicodeDecodeError, RecursionError and others.
    """
    return _Unpickler(file, allows).load()
