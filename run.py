"""Runs one point or a sweep:   python run.py zero=stage2 precision=bf16      python run.py --help"""

import os
import shlex
import sys
from pathlib import Path

OURS = ("orchestrator", "zero_runtime")


def start() -> int:
    """The exit code of the command."""
    try:
        from orchestrator.machine.children import forget_current_folder

        forget_current_folder()
        from orchestrator.cli import main

        return main(sys.argv[1:])
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] in OURS:
            raise
        python = Path(__file__).parent / ".venv" / "bin" / "python"
        ready = python.exists() and Path(sys.executable) != python.absolute()
        first = "type" if ready else "`make install`, then"
        print(f"error: {sys.executable} has no package '{missing.name}': {first}", file=sys.stderr)
        print(f"       {shlex.join([os.path.relpath(python), *sys.argv])}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(start())
