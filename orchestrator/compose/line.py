"""A command line's words as a composition: checked against the files of conf/ first, then composed by Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.compose import overrides
from orchestrator.compose.arguments import Arguments
from orchestrator.compose.settable import read_tree
from orchestrator.config.strict import Refusal

if TYPE_CHECKING:
    from orchestrator.compose.compose import Composition


def composed(asked: Arguments) -> Composition:
    """The points of a line, not yet judged. Refusal tells everything that is wrong with the words."""
    folder = asked.flags.get("--config-dir")
    problems = [*asked.problems, *_folder_problems(folder)]
    # While a word is still being completed it is not yet right, and Hydra lists what it could become.
    if asked.shows_config or not asked.shows:
        tree = read_tree(folder)
        problems += overrides.check(asked.overrides, tree, multirun=asked.multirun, flags=asked.folders())
    if problems:
        raise Refusal(problems)
    from orchestrator.compose import compose  # here: it imports Hydra, and the answers above are quicker without

    if asked.shows and not asked.shows_config:
        show(asked)
    try:
        return compose.compose(asked)
    except compose.ComposeError as error:
        raise Refusal([str(error)]) from None


def show(asked: Arguments) -> None:
    from orchestrator.compose import compose

    try:
        compose.show(asked)
    except compose.ComposeError as error:
        raise Refusal([str(error)]) from None


def _folder_problems(folder: str | None) -> list[str]:
    return [] if folder is None or Path(folder).is_dir() else [f"--config-dir: there is no folder '{folder}'"]
