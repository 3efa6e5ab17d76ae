"""Runs Hydra's own main on the zero-lab configuration for Hydra's sweepers; the launcher `zlab` runs each batch.

`python -m orchestrator.commands.hydra_app hydra/sweeper=optuna hydra.sweeper.direction=maximize
'batch.micro=choice(1,2,4)'`
"""

from __future__ import annotations

from orchestrator.machine import children

if __name__ == "__main__":
    children.forget_current_folder()

import os
import sys
import time
from collections.abc import Sequence

from orchestrator.compose import arguments
from orchestrator.exit_codes import INTERRUPTED
from orchestrator.text.streams import refuse, take_any_text

LAUNCHER = "hydra/launcher"
OURS = (*arguments.SWEEPING, "--retry", "--prune")


def main(argv: Sequence[str]) -> int:
    """0: the sweeper ended. 1: it failed. 2: the arguments were wrong, nothing was started. 130: interrupted."""
    take_any_text()
    asked = arguments.split(argv)
    problems = [*asked.problems]
    problems += [f"{flag} is not known to Hydra: see hydra.launcher.retry" for flag in OURS if flag in asked.flags]
    if "--config-name" in asked.flags:
        problems.append(
            "--config-name is not read here: a study has a file of experiment/, chosen with experiment=NAME"
        )
    others = [word for word in asked.overrides if word.startswith(f"{LAUNCHER}=") and word != f"{LAUNCHER}=zlab"]
    problems += [
        f"{word} would call a function that does not exist: only {LAUNCHER}=zlab runs points" for word in others
    ]
    if problems:
        return refuse(problems)
    os.umask(0o077)  # only the user can read what the runs write
    from orchestrator.compose import compose  # imported here so that the refusals above do not wait for Hydra

    if not asked.shows and not {"--help", "--version"} & asked.flags.keys():
        asked.flags["--multirun"] = None
    # Placed first, so that a folder given on the command line overrides it.
    folder = f"hydra.sweep.dir=${{output}}/studies/{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    words = [word for word in asked.overrides if not word.startswith(f"{LAUNCHER}=")]
    asked.overrides = [f"{LAUNCHER}=zlab", folder, *words]
    try:
        return compose.hand_over(asked)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
