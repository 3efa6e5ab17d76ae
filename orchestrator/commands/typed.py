"""Answers a typed line of overrides: help, Hydra's listings and wrong words; line.py carries out a line that is right.

A wrong word is answered before the planner and what starts ranks are imported."""

from __future__ import annotations

from orchestrator.compose import folders, help_page
from orchestrator.compose.arguments import Arguments
from orchestrator.compose.help_topics import Topics, width_of_terminal
from orchestrator.compose.line import composed
from orchestrator.compose.settable import read_tree


def answer(asked: Arguments) -> int:
    """The exit code of the command. Refusal: lists everything wrong with the arguments."""
    if "--help" in asked.flags:
        added = asked.flags.get("--config-dir")
        tree = read_tree(added)
        # Words of a run that is not started yet, as in `zero=stage2 --help`, do not narrow the page.
        if any("=" not in word for word in asked.overrides):
            print(Topics(tree, added, width_of_terminal()).page(asked.overrides))
        else:
            print(help_page.page(folders.CONF / "config.yaml", tree))
        return 0
    composition = composed(asked)
    from orchestrator.commands import line  # imported here: a line that is refused needs none of what it imports

    return line.run(composition, asked)
