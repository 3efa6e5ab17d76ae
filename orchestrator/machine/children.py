"""How Python processes of ours start: with our code on their path, and without the folder that somebody stands in.

`python -m` puts the current folder first: a `queue.py` or `torch.py` there, of a data set or of a stranger, would be
imported in place of the real one. So children are started as `python .../machine/children.py MODULE WORDS`, which puts
the path right before it imports anything, and then runs the module as `python -m` does.
"""

import sys

if __name__ == "__main__":
    # Python put this file's own folder first, unless it was asked not to (PYTHONSAFEPATH).
    sys.path[:] = sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]
    if (root := __file__.rsplit("/", 3)[0]) not in sys.path:
        sys.path.insert(0, root)

import os
import runpy
from collections.abc import Mapping

ROOT = os.path.abspath(__file__).rsplit("/", 3)[0]
PYTHONPATH = "PYTHONPATH"


def words(module: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """The command that runs a module of ours, or of a library, in a process of its own; give it `environment`."""
    return [sys.executable, *flags, os.path.abspath(__file__), module, *arguments]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a child: an empty entry of PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:/mine` easily has, would be the
    current folder. What somebody named there stays, the current folder too where it was named."""
    return {**base, **({PYTHONPATH: named(base)} if PYTHONPATH in base else {})}


def named(base: Mapping[str, str]) -> str:
    """PYTHONPATH less its empty entries."""
    return os.pathsep.join(filter(None, base.get(PYTHONPATH, "").split(os.pathsep)))


def forget_current_folder() -> None:
    """Takes what `python -m` and an empty entry of PYTHONPATH put there out of this process's path. For programs: in a
    notebook the path is its owner's. Ends the program where the current folder was deleted."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        print("error: the current folder was deleted: change to one that is there", file=sys.stderr)
        sys.exit(2)
    entries = os.environ.get(PYTHONPATH, "").split(os.pathsep)
    stays = {ROOT, *map(os.path.abspath, filter(None, entries))}
    standard = os.path.dirname(os.__file__)  # what comes after it is installed
    end = sys.path.index(standard) if standard in sys.path else len(sys.path)
    first = [one for one in sys.path[:end] if one in stays or os.path.abspath(one) != here]
    sys.path[:] = [*first, *sys.path[end:]]
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
