"""A package `deepspeed` whose public names are zero_runtime's; others raise NameMissingError when they are used.

A dotted name `deepspeed.a.b` is looked up in `zero_runtime.deepspeed.a`, then in `zero_runtime.a`. Constants and
enumerations that neither has are read from the source of the checkout, so that a file of tests is collected.
"""

from __future__ import annotations

import ast
import enum
import json
import sys
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

PACKAGE = "deepspeed"
# What the suite asks of DeepSpeed's build and of no script: which operators are compiled, and the versions it met.
_COMPILED = {"FusedAdamBuilder", "CPUAdamBuilder", "FusedLambBuilder"}


class NameMissingError(Exception):
    """A name of DeepSpeed that zero_runtime lacks was used."""


class Missing:
    """Stands for a missing name: an empty base class and a silent value while tests are collected, an error later."""

    collecting = True

    def __init__(self, name: str, told: str = "") -> None:
        self.__dict__.update(_name=name, _told=told)

    def __repr__(self) -> str:
        return f"<name missing: {self._name}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (Missing.collecting or name != "__name__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}") if Missing.collecting else self._raise()

    def __call__(self, *args: Any, **_: Any) -> Any:
        if Missing.collecting:  # as a decorator it changes nothing
            return args[0] if len(args) == 1 and callable(args[0]) else Missing(f"{self._name}()")
        return self._raise()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise NameMissingError(f"{self._name}{': ' if self._told else ''}{self._told}")

    __instancecheck__ = __subclasscheck__ = __iter__ = __getitem__ = __contains__ = __len__ = __enter__ = _raise
    __setattr__ = _raise


class _Module(ModuleType):
    """One module of the package."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if path in LENT:
            return LENT[path]
        if name.startswith("__"):
            raise AttributeError(f"{path} is not here")
        told = ""
        for module in _ours(self.__name__):
            try:
                found = getattr(module, name)
            except AttributeError as error:
                told = told or str(error)
                continue
            # A module of ours is reached through one of this package, which knows DeepSpeed's other names.
            return import_module(path) if isinstance(found, ModuleType) else found
        if source_of(path) is not None and name not in _bound(self.__name__):
            return import_module(path)
        known = _constants(self.__name__)
        return known[name] if name in known else Missing(path, told or _word_on(path))


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == PACKAGE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Lent(dict[str, Any]):
    """Names that belong to the suite's harness."""

    def __missing__(self, path: str) -> Any:
        raise KeyError(path)

    def __contains__(self, path: object) -> bool:
        is_builder = str(path).endswith("Builder") and ".ops." in str(path)
        if is_builder:
            self.setdefault(str(path), SimpleNamespace(NAME=str(path).rpartition(".")[2]))
        return is_builder or super().__contains__(path)


class _Compiled(dict[str, bool]):
    def __missing__(self, name: str) -> bool:
        return name in _COMPILED


LENT = _Lent(
    {
        "deepspeed.ops.__compatible_ops__": _Compiled(),
        # Versions that it takes for able to compute in bf16; a CPU is, and is not asked.
        "deepspeed.git_version_info.torch_info": {"version": "2.4", "nccl_version": "2.20", "cuda_version": "12.4"},
        "deepspeed.accelerator.is_current_accelerator_supported": lambda: True,
        "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1024**2,  # a size that tests of NVMe divide by
        # It gives each group of experts a group of parameters; models without experts keep theirs.
        "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer": lambda groups: (
            [groups] if isinstance(groups, dict) else groups
        ),
        "deepspeed.utils.torch.required_torch_version": lambda min_version=None, max_version=None: max_version is None,
    }
)
_checkout = Path()


def install(checkout: Path) -> None:
    """Make `import deepspeed` find the stand-in, in this process and in those that it forks."""
    global _checkout
    _checkout = checkout
    sys.meta_path.insert(0, _Finder())
    if find_spec("hjson") is None:
        sys.modules["hjson"] = json  # the suite's own reads of files that are plain JSON


def source_of(path: str) -> Path | None:
    """The file of a module of the checkout."""
    place = _checkout.joinpath(*path.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def _ours(path: str) -> list[ModuleType]:
    """Modules of ours that answer for the names of this one."""
    below = path.removeprefix(PACKAGE)
    found = []
    for root in ("zero_runtime.deepspeed", "zero_runtime"):
        # Of the packages that have one of DeepSpeed's names and another meaning.
        if root + below in ("zero_runtime.runtime", "zero_runtime.checkpoint", "zero_runtime.profile"):
            continue
        with suppress(ImportError):
            found.append(import_module(root + below))
    return found


def _word_on(path: str) -> str:
    """What a package of ours around it says of this name, or of the part of the path that it lacks; else empty."""
    parts = path.split(".")
    places = [(".".join(parts[:end]), name) for end in range(len(parts) - 1, 0, -1) for name in (parts[-1], parts[end])]
    words = (_refusal(module, name) for place, name in places for module in _ours(place))
    return next((word for word in words if "is not here" in word), "")


def _refusal(module: ModuleType, name: str) -> str:
    try:
        getattr(module, name)
    except AttributeError as error:
        return str(error)
    return ""


def _bound(path: str) -> set[str]:
    """Names that the module's source takes out of other modules: functions with the name of a module are among them."""
    source = source_of(path)
    nodes = ast.parse(source.read_text(encoding="utf-8")).body if source else []
    return {name.name for node in nodes if isinstance(node, ast.ImportFrom) and node.module for name in node.names}


def _constants(path: str) -> dict[str, Any]:
    """Values of the module's assignments and enumerations that need no import."""
    source, known = source_of(path), {"Enum": enum.Enum, "str": str, "int": int}
    for node in ast.parse(source.read_text(encoding="utf-8")).body if source else ():
        is_enum = isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)
        if is_enum or isinstance(node, ast.Assign):
            with suppress(Exception):  # what needs more stays missing
                code = compile(ast.Module([node], []), str(source), "exec")
                exec(code, {"__builtins__": {"__build_class__": __build_class__}, "__name__": path}, known)
    return known
