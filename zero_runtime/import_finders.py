"""What Python's import asks here: the short names of DeepSpeed's modules, and whether its own engine is taken."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TOLD = "ACCELERATE_USE_DEEPSPEED"
_MESSAGE = """expected zero_runtime to train, found accelerate told to use the package deepspeed: zero_runtime is \
imported, but does not train. For the Trainer of transformers, import these two from here instead:
    from zero_runtime.integrations.transformers import Trainer
    from zero_runtime.integrations.transformers import TrainingArguments
A loop of your own calls zero_runtime.initialize, not Accelerator(deepspeed_plugin=...); see docs/transformers.md"""


class OtherEngineFinder(MetaPathFinder):
    """Warns once when accelerate, told to use DeepSpeed, looks for that package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Always None: the module is found by others."""
        # `import zero_runtime as deepspeed` changes what a script calls, not what transformers' Trainer and accelerate
        # import: with `deepspeed=` in its arguments they take the package deepspeed, if it is installed. Just before,
        # accelerate sets a variable and looks for the package.
        if fullname == "deepspeed" and os.environ.get(TOLD, "").lower() == "true":
            sys.meta_path[:] = [one for one in sys.meta_path if one is not self]
            warnings.warn(_MESSAGE, stacklevel=2)

    def find_distributions(self, context: Any) -> list[Any]:
        """Always none. accelerate asks for the version too, and Python asks no finder for a module that is imported."""
        self.find_spec(context.name, None)
        return []


class ShortNames(MetaPathFinder, InspectLoader):
    """Makes `zero_runtime.zero` and what is inside it a second name of the same module, `zero_runtime.deepspeed.zero`.

    A class is then one class under both names, and `isinstance` answers alike.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for other names, and for a module that is not there."""
        package, *inside = fullname.split(".")
        if package != "zero_runtime" or not inside or inside[0] not in self._modules:
            return None
        spec = PathFinder.find_spec(fullname, path if inside[1:] else [f"{folder}/deepspeed" for folder in path or ()])
        if spec is not None:
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its long name."""
        module = import_module(_long(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed twice; the module keeps its own spec, which the import system has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_source(self, fullname: str) -> str | None:
        """The text of a module, which `python -m` runs under its short name."""
        loader = import_module(_long(fullname)).__loader__
        return loader.get_source(_long(fullname)) if isinstance(loader, InspectLoader) else None


def _long(name: str) -> str:
    return name.replace("zero_runtime.", "zero_runtime.deepspeed.", 1)
