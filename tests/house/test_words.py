"""The word "stage" occurs in the runtime's code only in plan.py and in the files that know DeepSpeed's keys.

All other code asks a plan. Comments and docstrings may use the word.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "zero_runtime"
FILES = sorted(RUNTIME.rglob("*.py"))
# The files for DeepSpeed contain the word because DeepSpeed's published keys do. The translator of zero_optimization
# gets a plan from ZeroPlan.from_stage and passes that on, so that no code behind it needs the word.
SPEAKERS = (
    RUNTIME / "plan.py",
    RUNTIME / "deepspeed" / "zero_section.py",
    RUNTIME / "deepspeed" / "compressed.py",
    RUNTIME / "deepspeed" / "engine_settings.py",
    RUNTIME / "deepspeed" / "runtime" / "config.py",
    RUNTIME / "deepspeed" / "runtime" / "zero" / "__init__.py",
    RUNTIME / "deepspeed" / "foreign_checkpoints" / "deepspeed.py",
)
NAMING_FIELDS = ("id", "attr", "arg", "name", "asname", "module")  # fields of syntax nodes that can hold an identifier
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # splits fromStage, from_stage and STAGE into words


def words(source: str) -> Iterator[tuple[int, str]]:
    """(line, lower-case word) for every word in identifiers and in strings that are not docstrings."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        texts = [getattr(node, field, None) for field in NAMING_FIELDS]
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            texts.append(node.value)
        for text in texts:
            if isinstance(text, str):
                yield from ((getattr(node, "lineno", 0), word.lower()) for word in PARTS.findall(text))


def stage_words(source: str) -> list[int]:
    """Line numbers on which "stage" or "stages" occurs."""
    return sorted({line for line, word in words(source) if word in ("stage", "stages")})


@pytest.mark.parametrize("file", [file for file in FILES if file not in SPEAKERS], ids=lambda file: file.name)
def test_the_word_stage_occurs_only_in_the_plan_and_the_deepspeed_files(file: Path) -> None:
    assert stage_words(file.read_text()) == []


@pytest.mark.parametrize("file", SPEAKERS, ids=lambda file: file.name)
def test_the_plan_and_the_deepspeed_files_contain_the_word_stage(file: Path) -> None:
    assert stage_words(file.read_text())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if stage == 3: ...", True),
        ("def from_stage(n): ...", True),
        ("def f(zero_stage=1): ...", True),
        ("f(stage=1)", True),
        ("class StagePlan: ...", True),
        ("STAGES = {}", True),
        ("x.isStage", True),
        ("x = 'at stage 3'", True),
        ("x = f'at Stage {n}'", True),
        ("import stage as s", True),
        ("# stage 3\nx = 1", False),
        ('"""Stage 3."""', False),
        ('def f():\n    """Stage 3."""', False),
        ("staging = backstage", False),
    ],
)
def test_the_search_covers_identifiers_and_strings_but_not_comments_and_docstrings(source: str, found: bool) -> None:
    assert bool(stage_words(source)) is found
