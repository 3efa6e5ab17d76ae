"""Every public class has a unique name, so that readers and editors who search for a name find one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "zero_runtime", "orchestrator")


def classes(source: str) -> list[str]:
    """The public classes that a module defines, nested ones included."""
    names = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [name for name in names if not name.startswith("_")]


def shared_names(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that several public classes share, with the files that define them; `sources` are (file, source)."""
    files = defaultdict(list)
    for file, source in sources:
        for name in classes(source):
            files[name].append(file)
    return {name: sorted(found) for name, found in files.items() if len(found) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    # zero_runtime/kernels is a link to kernels/: each file counts once.
    paths = sorted({path.resolve() for package in PACKAGES for path in (ROOT / package).rglob("*.py")})
    assert len(paths) > 100, "expected the source files of the packages"
    sources = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths]
    assert shared_names(sources) == {}


def test_the_check_finds_shared_names() -> None:
    sources = [("a.py", "class Place: ...\nclass _Own: ..."), ("b.py", "def f():\n class Place: ...\nclass _Own: ...")]
    assert shared_names(sources) == {"Place": ["a.py", "b.py"]}
    assert shared_names([("a.py", "class Place: ..."), ("b.py", "class Verdict: ...")]) == {}


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports test files by their names alone, and collects only the first of two."""
    files = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        files[path.name].append(str(path.relative_to(ROOT)))
    assert len(files) > 100, "expected the test files"
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
