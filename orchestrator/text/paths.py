"""Paths and commands as they are shown to a person."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

OUTPUT, DEFAULT_OUTPUT = "ZLAB_OUTPUT", "outputs"
SCRIPT, ZLAB = "run.py", "zlab"
CODE = Path(__file__).resolve().parents[2]  # the folder that holds our packages: a checkout, or site-packages
STARTED_IN = Path.cwd()  # a sweep is gone on with in the folder where it was typed


def expanded(text: str) -> Path:
    """The path with ~ written out; as it was typed where nobody has that name, so that it is missed as any other."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def shown(path: Path) -> str:
    """The path as short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def verb(name: str, sweep: Path) -> str:
    """The command that asks for something of a sweep, which may lie in another output folder than the default."""
    output = sweep.parent.parent
    there = (
        ""
        if output == Path(os.environ.get(OUTPUT, DEFAULT_OUTPUT)).absolute()
        else f" --output {shlex.quote(shown(output))}"
    )
    return f"{program()} {name} {sweep.name}{there}"


def dashboard(output: Path) -> str:
    """The command that opens the dashboard on an output folder."""
    there = (
        "" if output == Path(os.environ.get(OUTPUT, DEFAULT_OUTPUT)).absolute() else f" {shlex.quote(shown(output))}"
    )
    return f"{program()} ui{there}"


def program() -> str:
    """The words that call this command again from here: `zlab`, or an interpreter and run.py, as it was called.

    They work when they are pasted: where `python` or `zlab` on the PATH is another one, the path stands instead.
    """
    called = Path(sys.argv[0])
    if called.name == ZLAB:
        return _typed(STARTED_IN / called, ZLAB)
    interpreter = _typed(Path(sys.executable), "python")
    if called.name == SCRIPT:
        script = called if Path.cwd() == STARTED_IN else STARTED_IN / called
    elif (CODE / SCRIPT).is_file():
        script = CODE / SCRIPT
    else:  # a program of the user's own, with zero-lab installed
        return _typed(Path(sys.executable).with_name(ZLAB), ZLAB)
    return f"{interpreter} {shlex.quote(SCRIPT if Path.cwd() / script == Path.cwd() / SCRIPT else str(script))}"


def _typed(wanted: Path, name: str) -> str:
    """`name` where the shell finds `wanted` under it, else its path. An activated environment is one such case."""
    known = Path(shutil.which(name) or os.devnull)
    # The folder too: the python of each environment is a link to the same interpreter.
    if known.parent.resolve() == wanted.parent.resolve() and known.resolve() == wanted.resolve():
        return name
    return shlex.quote(shown(wanted))
