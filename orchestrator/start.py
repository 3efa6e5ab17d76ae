"""The entry point of the installed command `zlab`."""

import sys

from orchestrator.machine.children import forget_current_folder


def console() -> None:
    forget_current_folder()
    from orchestrator.cli import main  # here: its imports must not come from the current folder

    sys.exit(main(sys.argv[1:]))
