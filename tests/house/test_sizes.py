"""Files and functions are small enough to be read as a whole, and the root holds what the floor plan names."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES, FUNCTION_LINES = 450, 60
ROOT_FOLDERS = {
    *(".ci", ".github", "benchmarks", "conf", "docs", "examples"),
    *("kernels", "orchestrator", "sweeps", "tests", "zero_runtime"),
}


def files_of_the_project(*patterns: str) -> list[str]:
    """Tracked files and those that could be: what git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    return [file for file in listed.stdout.splitlines() if (ROOT / file).is_file()]


def too_long(file: str, source: str) -> Iterator[str]:
    """One line for the file, and for each function in it, that is over its limit. Docstrings and comments count."""
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        yield f"{file}: {lines} lines, expected at most {FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{file}:{node.lineno}: {node.name} has {lines} lines, expected at most {FUNCTION_LINES}"


def test_no_file_and_no_function_is_too_long() -> None:
    files = files_of_the_project("*.py")
    assert len(files) > 300, "expected the source files, the tests and the benchmarks"
    found = [line for file in files for line in too_long(file, (ROOT / file).read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_the_root_has_no_folder_besides_those_of_the_floor_plan() -> None:
    """A command typed at the root writes folders there, which are then easily committed with a change."""
    found = {Path(file).parts[0] for file in files_of_the_project() if "/" in file}
    assert found == ROOT_FOLDERS


def test_the_check_counts_lines() -> None:
    body = "    x = 1\n" * FUNCTION_LINES
    assert list(too_long("a.py", f"def short():\n{body[: -len('    x = 1')]}")) == []
    (function,) = too_long("a.py", f"class A:\n  def long(self):\n{body}")
    assert function == f"a.py:2: long has {FUNCTION_LINES + 1} lines, expected at most {FUNCTION_LINES}"
    (file,) = too_long("b.py", "x = 1\n" * (FILE_LINES + 1))
    assert file == f"b.py: {FILE_LINES + 1} lines, expected at most {FILE_LINES}"
