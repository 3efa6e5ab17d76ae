"""The example generates on two ranks what plain Transformers generates in one process."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

from harness.ranks import run_alone, run_ranks

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "generate_two_prompts.py"


def printed(*words: str) -> str:
    """What the script prints in this process, which may be a rank of an initialized world."""
    out, before = io.StringIO(), sys.argv
    sys.argv = [str(SCRIPT), *words]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


def on_two_ranks() -> str:
    return printed()


def on_one_process() -> str:
    return printed("--plain")


def test_two_ranks_print_the_answers_of_plain_transformers() -> None:
    plain = run_alone(on_one_process)
    assert plain.count("tokens [") == 2
    assert "".join(run_ranks(on_two_ranks, 2)) == plain
