"""Composes a command line: checks its words against the files of conf/ first, then composes its points."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator import wings
from orchestrator.compose import folders
from orchestrator.compose.arguments import Arguments
from orchestrator.compose.composition import Composition
from orchestrator.compose.settable import read_tree
from orchestrator.config.strict import Refusal
from orchestrator.text.paths import shown
from orchestrator.text.streams import complain

MOST_NAMES = 3  # that a note lists


def composed(asked: Arguments) -> Composition:
    """The points of a command line, before their values are checked. Refusal lists all problems of the words.

    Ends the process if the line has a flag of Hydra's that shows something, such as --cfg, after Hydra has answered it.
    """
    if sys.flags.optimize:
        raise Refusal(asked.problems)  # Hydra cannot even be imported
    # Imported here: it imports Hydra's parser, a tenth of a second that --help and most verbs do without.
    from orchestrator.compose import overrides

    folder = asked.flags.get("--config-dir")
    problems = [*asked.problems, *_folder_problems(folder)]
    asked.overrides = wings.load(wings.NAMES)(asked.overrides, folder)
    # Shell completion gets words that are still incomplete, so they are not checked.
    if asked.shows_config or not asked.shows:
        tree = read_tree(folder)
        problems += overrides.check(asked.overrides, tree, multirun=asked.multirun, flags=asked.folders())
    _note_own_files(asked)
    _note_replaced(asked.overrides)
    if problems:
        raise Refusal(problems)
    from orchestrator.compose import compose  # imported here: it looks for plugins, which no wrong word needs

    try:
        if asked.shows and not asked.shows_config:
            compose.show(asked)
        found = compose.compose(asked)
        if asked.shows_config:  # after it, which says in one line what is wrong with a file
            compose.show(asked)
        return found
    except compose.ComposeError as error:
        raise Refusal([str(error)]) from None


def _note_own_files(asked: Arguments) -> None:
    """Names the files of the user's that take the place of others, and those that do not, as they are named alike."""
    folder = asked.flags.get("--config-dir")
    if replacing := folders.replacing(folder):
        names = [shown(file) for file in replacing]
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        _note(f"used in place of other files of the same name: {', '.join(names[:MOST_NAMES])}{more}")
    for file in (own / f"{folders.PRIMARY}.yaml" for own in folders.own_folders(folder)):
        if file.is_file() and "--config-name" not in asked.flags:
            _note(f"{shown(file)} is not used: give it another name, and --config-name NAME")


def _note_replaced(words: Sequence[str]) -> None:
    """Names a setting that is given twice: the last one is used."""
    last = {word.partition("=")[0]: word for word in words}
    for word in words:
        if "=" in word and word != (kept := last[word.partition("=")[0]]):
            _note(f"{kept} replaces {word}, which is given before it")


@functools.cache
def _note(text: str) -> None:
    """Prints the note once, though a command may compose many lines; under a launcher by rank 0 alone."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        complain(f"note: {text}")


def _folder_problems(folder: str | None) -> list[str]:
    return [] if folder is None or Path(folder).is_dir() else [f"--config-dir: there is no folder '{folder}'"]
