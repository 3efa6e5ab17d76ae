"""Imports what a count of shapes and activations needs, and as little else as possible.

[Note: lean imports]
A third of the time of a count's imports went into packages that it does not use: `torch._dynamo`,
which torch and transformers import to exempt functions from compilation; transformers' own package, which reads the
sources of all of its models for the names in them, twice; and optional libraries. Optional ones are left out as where
they are not installed. The packages take their modules' place as `PostponedPackage`s: modules within them are imported
as always, and the package itself is when something asks for a name that only it has, which then takes as long as it
would have taken. The modules of `torch._dynamo` import each other in circles that end well in one order alone, so that
it cannot be executed late: where an import fails, memory_cache.py asks a process with all imports. Nothing may be
imported while a step is traced, since modules make tensors too: what fake tensors need is imported here, and
activations.py looks for the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

OPTIONAL = ("accelerate", "scipy", "sklearn", "pandas", "triton")
TRACING = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo.source", "torch.distributed.tensor")


class PostponedPackage(ModuleType):
    """Takes the place of a package whose own file has not been executed yet. given: names that it has until then."""

    _is_postponed: bool

    def __init__(self, name: str, /, **given: Any) -> None:
        super().__init__(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"there is no package {name}", name=name)
        self.__spec__, self.__file__, self.__package__ = spec, spec.origin, name
        self.__path__ = spec.submodule_search_locations
        vars(self).update(given, _is_postponed=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._is_postponed and importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        if self._is_postponed:
            self._is_postponed = False
            assert self.__spec__ is not None
            assert self.__spec__.loader is not None
            self.__spec__.loader.exec_module(self)
            if name in vars(self):
                return vars(self)[name]
        now = sys.modules[self.__name__]  # a package may put another module in its place, as transformers does
        if now is self:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        return getattr(now, name)


def import_lean() -> None:
    """See [Note: lean imports]. To be called before torch is imported, and not where an adapter is needed: PEFT needs
    several of the optional libraries."""
    for name in OPTIONAL:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # an import of it fails from now on
    import torch

    # Nothing is compiled here, so that a function that is exempt from it is the function itself.
    torch._dynamo = _postpone(
        "torch._dynamo",
        disable=_unchanged,
        assume_constant_result=_unchanged,
        allow_in_graph=_unchanged,
        is_compiling=lambda: False,
    )
    for name in TRACING:
        importlib.import_module(name)
    transformers = _postpone("transformers", __version__=version("transformers"))
    transformers.models = _postpone("transformers.models")  # type: ignore[attr-defined]


def _postpone(name: str, **given: Any) -> PostponedPackage:
    sys.modules[name] = postponed = PostponedPackage(name, **given)
    return postponed


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator that changes nothing, with and without arguments of its own."""
    return _same if function is None else function


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
