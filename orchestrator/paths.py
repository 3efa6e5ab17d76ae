"""Paths and commands as they are shown to a person."""

from __future__ import annotations

import sys
from pathlib import Path


def shown(path: Path) -> str:
    """The path as short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def program() -> str:
    """How this command was called, so that the next one can be called alike."""
    return "zlab" if Path(sys.argv[0]).name == "zlab" else "python run.py"
