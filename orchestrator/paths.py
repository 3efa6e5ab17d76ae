"""Paths and commands as they are shown to a person."""

from __future__ import annotations

import os
import sys
from pathlib import Path

OUTPUT, DEFAULT_OUTPUT = "ZLAB_OUTPUT", "outputs"
SCRIPT = "run.py"
STARTED_IN = Path.cwd()  # a sweep is gone on with in the folder where it was typed


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


def dashboard(output: Path) -> str:
    """The command that opens the dashboard on an output folder."""
    there = "" if output == Path(os.environ.get(OUTPUT, DEFAULT_OUTPUT)).absolute() else f" {shown(output)}"
    return f"{program()} ui{there}"


def program() -> str:
    """How this command was called, so that the next one can be called alike: from another folder by its path."""
    called = Path(sys.argv[0])
    if called.name == "zlab":
        return "zlab"
    if called.name != SCRIPT or STARTED_IN / called == Path.cwd() / SCRIPT:
        return f"python {SCRIPT}"
    return f"python {called if Path.cwd() == STARTED_IN else STARTED_IN / called}"
