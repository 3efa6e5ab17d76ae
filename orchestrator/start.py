"""The entry point of the installed command `zlab`."""

import sys

from orchestrator.machine.children import forget_current_folder


def console() -> None:
    forget_current_folder()
    from orchestrator.cli import main  # imported here so that its imports do not come from the current folder

    sys.exit(main(sys.argv[1:]))
