"""Runs one point or a sweep:   python run.py zero=stage2 precision=bf16      python run.py --help"""

import sys

OURS = ("orchestrator", "zero_runtime")


def start() -> int:
    """The exit code of the command."""
    try:
        from orchestrator.cli import main

        return main(sys.argv[1:])
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] in OURS:
            raise
        print(f"error: {sys.executable} has no package '{missing.name}': `make install`, then", file=sys.stderr)
        print(f"       .venv/bin/python {' '.join(sys.argv)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(start())
