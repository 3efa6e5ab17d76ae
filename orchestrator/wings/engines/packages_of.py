"""A program that says which Python runs it and which packages it has: `PYTHON packages_of.py NAME ...` prints JSON.

It needs the standard library alone, and runs in an old Python 3 too, which then says how old it is.
"""

import json
import sys

FIRST = (3, 10)  # of zero-lab's code


def versions(names: "tuple[str, ...]") -> "dict[str, str | None]":
    """The version of each distribution, None if it is not installed."""
    from importlib import metadata

    def version(name: str) -> "str | None":
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in names}


if __name__ == "__main__":
    here = __file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry != here]  # its files have the names of packages
    known = versions(tuple(sys.argv[1:])) if sys.version_info >= FIRST else {}
    print(json.dumps({"python": sys.version_info[:2], "packages": known}))
