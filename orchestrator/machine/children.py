"""Starts Python child processes with our code on their import path, and without the current folder.

`python -m` puts the current folder first on the path, so that a file such as `queue.py` or `torch.py` there, from a
data set or another user, would be imported instead of the real module. Children are therefore started as
`python .../machine/children.py MODULE WORDS`, which corrects the path before it imports anything, and then runs the
module as `python -m` does.
"""

import sys

if __name__ == "__main__":
    # Python has put this file's folder first on the path, unless PYTHONSAFEPATH tells it not to.
    sys.path[:] = sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]
    if (root := __file__.rsplit("/", 3)[0]) not in sys.path:
        sys.path.insert(0, root)

import os
import runpy
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = os.path.abspath(__file__).rsplit("/", 3)[0]
PYTHONPATH = "PYTHONPATH"


def words(
    module: str, *arguments: str, flags: tuple[str, ...] = (), code: str | None = None, python: str | None = None
) -> list[str]:
    """The command that runs a module of ours or of a library as a child; start it with the result of `environment`.

    code: a folder with another checkout, whose modules the child imports instead of ours. python: another interpreter,
    whose packages it imports.
    """
    return [python or sys.executable, *flags, program_in(code or ROOT), module, *arguments]


def program_in(code: str) -> str:
    """This file in a checkout."""
    return os.path.join(code, os.path.relpath(os.path.abspath(__file__), ROOT))


def script_words(script: Sequence[str]) -> list[str]:
    """The command that runs a user's own script, or after "-m" a module, with its arguments, by this interpreter."""
    return [sys.executable, *script]


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    stream: int | None = None,
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a command of `words` in a session of its own, in which it gets no Ctrl-C.

    Its output is appended to `log`. `stream`: used for its stdin and stdout instead, such as subprocess.PIPE.
    """
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment(environ),
            stdin=subprocess.DEVNULL if stream is None else stream,
            stdout=file if stream is None else stream,
            stderr=file,
            start_new_session=True,
        )


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a child process, with the empty entries of PYTHONPATH removed.

    An empty entry, which `PYTHONPATH=$PYTHONPATH:/mine` easily produces, means the current folder. Explicit entries
    stay, even if one of them names the current folder.
    """
    return {**base, **({PYTHONPATH: named(base)} if PYTHONPATH in base else {})}


def named(base: Mapping[str, str]) -> str:
    """The value of PYTHONPATH without its empty entries."""
    return os.pathsep.join(filter(None, base.get(PYTHONPATH, "").split(os.pathsep)))


def forget_current_folder() -> None:
    """Removes the current folder from this process's path, where `python -m` or an empty entry of PYTHONPATH put it.

    Only for our own programs: in a notebook the path belongs to the user. Exits the program if the current folder was
    deleted.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:
        print("error: the current folder was deleted: change to one that exists", file=sys.stderr)
        sys.exit(2)
    entries = os.environ.get(PYTHONPATH, "").split(os.pathsep)
    stays = {ROOT, *map(os.path.abspath, filter(None, entries))}
    standard = os.path.dirname(os.__file__)  # entries after it are installed packages
    end = sys.path.index(standard) if standard in sys.path else len(sys.path)
    first = [entry for entry in sys.path[:end] if entry in stays or os.path.abspath(entry) != here]
    sys.path[:] = [*first, *sys.path[end:]]
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
