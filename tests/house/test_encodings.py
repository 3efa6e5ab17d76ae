"""The source names the encoding of every text file and pipe that it opens, so the locale has no influence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [*(path for top in ("kernels", "zero_runtime", "orchestrator") for path in sorted((ROOT / top).rglob("*.py")))]
TEXT_CALLS = {"read_text", "write_text"}
# Our own methods, such as CheckpointReader.open, do not count: a call opens a file if it has a mode or is the builtin.
MODES = set("rwaxt+")


def unnamed(source: str) -> list[int]:
    """Line numbers on which text is opened without an encoding."""
    return sorted(_unnamed(ast.parse(source)))


def _unnamed(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = {one.arg for one in node.keywords}
            if _is_text(node) and "encoding" not in named:
                yield node.lineno


def _is_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    words = {one.arg: one.value for one in call.keywords}
    if name in TEXT_CALLS and isinstance(call.func, ast.Attribute):
        return True
    if isinstance(words.get("text"), ast.Constant) and words["text"].value is True:
        return name in ("run", "Popen", "check_output")
    if name != "open":
        return False
    builtin = isinstance(call.func, ast.Name)
    places = call.args[1:] if builtin else call.args[:1]
    mode = words.get("mode") or (places[0] if places else None)
    if mode is None:
        return builtin
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) <= MODES


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_text_is_opened_with_an_encoding(file: Path) -> None:
    assert unnamed(file.read_text(encoding="utf-8")) == []


def test_the_check_recognizes_every_way_to_open_text() -> None:
    forms = ["open(p)", "open(p, 'w')", "p.open('a')", "p.read_text()", "p.write_text('x')", "run(x, text=True)"]
    assert unnamed("\n".join(forms)) == [1, 2, 3, 4, 5, 6]
    fine = ["open(p, 'rb')", "p.open('wb')", "p.read_text(encoding='utf-8')", "CheckpointReader.open(p)", "gate.open()"]
    assert unnamed("\n".join(fine)) == []


def test_no_two_files_differ_by_case_alone() -> None:
    names = [
        str(path.relative_to(ROOT)).lower() for top in ("conf", "sweeps", "tests") for path in (ROOT / top).rglob("*")
    ]
    names += [str(path.relative_to(ROOT)).lower() for path in FILES]
    assert len(names) == len(set(names))
