"""Paths and commands as they are shown in messages, ready to be pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

OUTPUT, DEFAULT_OUTPUT = "ZLAB_OUTPUT", "outputs"
SCRIPT, ZLAB = "run.py", "zlab"
CODE = Path(__file__).resolve().parents[2]  # the folder with our packages: a checkout, or site-packages
STARTED_IN = Path.cwd()  # resuming a sweep changes to the folder where it was typed


def expanded(text: str) -> Path:
    """The path with ~ expanded. Unchanged if ~NAME is not a known user: then it is missing like any other path."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def shown(path: Path) -> str:
    """The path relative to the current folder if it is inside it, else unchanged."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def verb(name: str, sweep: Path) -> str:
    """The command that applies a verb to a sweep, with --output if the sweep is not in the default output folder."""
    return f"{program()} {name} {sweep.name}{_output_option(sweep.parent.parent, ' --output')}"


def dashboard(output: Path) -> str:
    """The command that opens the dashboard for an output folder."""
    return f"{program()} ui{_output_option(output, ' --output')}"


def _output_option(output: Path, flag: str) -> str:
    """The words that name an output folder; none for the default one."""
    is_default = output == Path(os.environ.get(OUTPUT, DEFAULT_OUTPUT)).absolute()
    return "" if is_default else f"{flag} {shlex.quote(shown(output))}"


def program() -> str:
    """The words that call this program from the current folder as it was called: `zlab`, or an interpreter and run.py.

    They work when pasted: if `python` or `zlab` on the PATH is a different program, its full path is used instead.
    """
    called = Path(sys.argv[0])
    if called.name == ZLAB:
        return name_or_path(STARTED_IN / called, ZLAB)
    if called.name == SCRIPT:
        script = called if Path.cwd() == STARTED_IN else STARTED_IN / called
    elif (CODE / SCRIPT).is_file():
        script = CODE / SCRIPT
    else:  # a program of the user's own, with zero-lab installed
        return name_or_path(Path(sys.executable).with_name(ZLAB), ZLAB)
    return f"{python()} {shlex.quote(SCRIPT if Path.cwd() / script == Path.cwd() / SCRIPT else str(script))}"


def python() -> str:
    """This interpreter, as it is typed."""
    return name_or_path(Path(sys.executable), "python")


def name_or_path(wanted: Path, name: str) -> str:
    """`name` if the shell finds `wanted` under that name, as in an activated environment; else the path of `wanted`."""
    known = Path(shutil.which(name) or os.devnull)
    # The folders must be equal too, since the python of every environment is a link to the same interpreter.
    if known.parent.resolve() == wanted.parent.resolve() and known.resolve() == wanted.resolve():
        return name
    return shlex.quote(shown(wanted))
