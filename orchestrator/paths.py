"""Paths and commands as they are shown to a person."""

from __future__ import annotations

import os
import sys
from pathlib import Path

OUTPUT, DEFAULT_OUTPUT = "ZLAB_OUTPUT", "outputs"


def shown(path: Path) -> str:
    """The path as short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def verb(name: str, sweep: Path) -> str:
    """The command that asks for something of a sweep, which may lie in another output folder than the default."""
    output = sweep.parent.parent
    there = "" if output == Path(os.environ.get(OUTPUT, DEFAULT_OUTPUT)).absolute() else f" --output {shown(output)}"
    return f"{program()} {name} {sweep.name}{there}"


def program() -> str:
    """How this command was called, so that the next one can be called alike."""
    return "zlab" if Path(sys.argv[0]).name == "zlab" else "python run.py"
