"""Private names of other packages that the product uses are those of private_names.txt, and the installed versions have
them.

A new version of a package may drop one without a word: the table says so, and its tests say what no longer works.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for top in ("kernels", "zero_runtime", "orchestrator") for path in (ROOT / top).rglob("*.py"))
PACKAGES = (
    "accelerate",
    "argparse",
    "ctypes",
    "hydra",
    "mlflow",
    "omegaconf",
    "peft",
    "submitit",
    "torch",
    "transformers",
)
ONLY_TOP = ("submitit",)  # documents what can be imported from its top level and nothing else
DOCUMENTED = ("_asdict", "_fields", "_make", "_replace", "_exit", "_getframe", "_current_frames")  # of Python
# Where a string with a private name may be an attribute's name.
STRINGS_OF = (
    *("torch", "torch.Tensor", "torch.nn.Module()", "torch.nn.MultiheadAttention", "transformers.PreTrainedModel"),
    "transformers.LlamaConfig()",
)


class Row(NamedTuple):
    """A row of the table: `names` are attributes of the value of the expression `owner`."""

    package: str
    owner: str
    names: list[str]
    test: str


def table() -> list[Row]:
    lines = Path(__file__).with_name("private_names.txt").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if not line.startswith("#")]
    return [Row(package, owner, names.split(), test) for package, owner, names, test in cells]


def value(expression: str) -> Any:
    """Of an expression that begins with a dotted name, whose modules are imported."""
    path = re.match(r"[\w.]+", expression)
    assert path is not None, expression
    parts = path[0].split(".")
    for count in range(1, len(parts) + 1):
        with suppress(ModuleNotFoundError):
            importlib.import_module(".".join(parts[:count]))
    return eval(expression, {parts[0]: importlib.import_module(parts[0])})


# ---- what the product uses -------------------------------------------------------------------------------------------


class Uses(NamedTuple):
    """dotted: names with their package. attributes: names of attributes of values, whose package is not known."""

    dotted: set[str]
    attributes: set[str]


def uses(sources: list[str]) -> Uses:
    trees = [ast.parse(source) for source in sources]
    defined = [set(_defined(tree)) for tree in trees]
    found, ours = Uses(set(), set()), set().union(*defined)
    for tree, here in zip(trees, defined, strict=True):
        imported = dict(_imported(tree))
        found.dotted.update(filter(_counts, _dotted_names(tree, imported)))
        found.attributes.update(_attributes(tree, set(imported), here, ours))
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_") and name not in DOCUMENTED


def _counts(name: str) -> bool:
    package, *rest = name.split(".")
    return package in PACKAGES and (any(map(_is_private, rest)) or (package in ONLY_TOP and len(rest) > 1))


def _defined(tree: ast.AST) -> Iterator[str]:
    """Every name that a file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name in the file, dotted name) of everything that it imports from PACKAGES."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [(one.asname or one.name.split(".")[0], one.name) for one in node.names]
            pairs = [(own, whole if own != whole.split(".")[0] else own) for own, whole in pairs]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [(one.asname or one.name, f"{node.module}.{one.name}") for one in node.names]
        else:
            continue
        yield from (pair for pair in pairs if pair[1].split(".")[0] in PACKAGES)


def _dotted_names(tree: ast.AST, imported: dict[str, str]) -> Iterator[str]:
    yield from imported.values()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield _dotted(node, imported)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ClassDef):
            yield from _overridden(node, imported)


def _dotted(node: ast.expr, imported: dict[str, str]) -> str:
    """torch._C.name for torch._C.name.__code__; empty if the expression does not begin with an import."""
    found = re.fullmatch(r"(\w+)((\.\w+?)*?)(\.__\w+__.*)?", ast.unparse(node))
    return "" if found is None or found[1] not in imported else imported[found[1]] + found[2]


def _overridden(node: ast.ClassDef, imported: dict[str, str]) -> Iterator[str]:
    """What a class defines under a private name that its base class of another package has."""
    for base in filter(None, (_dotted(base, imported) for base in node.bases)):
        yield from (f"{base}.{name}" for name in _defined(node) if _is_private(name) and hasattr(value(base), name))


def _attributes(tree: ast.AST, imported: set[str], here: set[str], ours: set[str]) -> Iterator[str]:
    """Private attributes, of `self` if no file of ours defines them, of another value if this file does not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            known = ours if _is_self(node.value) else here
            if node.attr not in known and ast.unparse(node).split(".")[0] not in imported:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value):
            yield from {node.value for owner in _owners_of_strings() if hasattr(owner, node.value)}


@cache
def _owners_of_strings() -> list[Any]:
    return [value(expression) for expression in STRINGS_OF]


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", sorted({row.package for row in table()}))
def test_the_installed_version_has_every_listed_name(package: str) -> None:
    listed = [(row.owner, name) for row in table() if row.package == package for name in row.names]
    assert [f"{owner} has no {name}" for owner, name in listed if not hasattr(value(owner), name)] == []


def test_the_product_uses_the_listed_names_and_no_other_private_ones() -> None:
    dotted, attributes = uses([path.read_text(encoding="utf-8") for path in FILES])
    listed = {f"{row.owner}.{name}": name for row in table() for name in row.names}
    unlisted = sorted({*(dotted - listed.keys()), *(attributes - set(listed.values()))})
    assert unlisted == [], "add them to tests/house/private_names.txt, or do without"
    unused = [whole for whole, name in listed.items() if whole not in dotted and name not in attributes]
    assert unused == [], "remove them from tests/house/private_names.txt"


def test_the_tests_of_the_table_exist() -> None:
    named = sorted({row.test for row in table()} - {"-"})
    missing = [test for test in named if not _has(*test.split("::"))]
    assert missing == []


def _has(file: str, function: str) -> bool:
    path = ROOT / file
    return path.is_file() and f"\ndef {function}(" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "dotted", "attributes"),
    [
        ("import torch\ntorch._C.one(2)", {"torch._C.one"}, set()),
        ("import torch as t\nt.cuda._x.__name__", {"torch.cuda._x"}, set()),
        ("from torch._ops import OpOverload", {"torch._ops.OpOverload"}, set()),
        ("from submitit.local import local", {"submitit.local.local"}, set()),
        ("from submitit import LocalExecutor", set(), set()),
        ("name = 'torch._dynamo'", {"torch._dynamo"}, set()),
        (
            "import torch\nclass A(torch.nn.Module):\n    def _call_impl(self): ...",
            {"torch.nn.Module._call_impl"},
            set(),
        ),
        ("import torch\nclass A(torch.nn.Module):\n    def _own(self): ...", set(), set()),
        ("def f(tensor): return tensor._version", set(), {"_version"}),
        ("def f(module): return getattr(module, '_parameters')", set(), {"_parameters"}),
        (
            "class A:\n    def __init__(self): self._own = 1\n    def f(self, other): return other._own + self._own",
            set(),
            set(),
        ),
        ("def f(pair): return pair._replace(a=1)", set(), set()),
    ],
)
def test_the_search_finds_private_names(source: str, dotted: set[str], attributes: set[str]) -> None:
    assert uses([source]) == Uses(dotted, attributes)
