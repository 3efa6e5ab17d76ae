"""Every benchmark can be started: a name that the product lost since it was written would end it at its import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
from importlib import import_module
for name in {names}:
    import_module(f"benchmarks.{{name}}")
"""


def test_every_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    words = [sys.executable, "-c", IMPORTS.format(names=names)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
