"""Answers a typed line of overrides: help, Hydra's listings and wrong words; line.py carries out a line that is right.

A wrong word is answered before the planner and what starts ranks are imported."""

from __future__ import annotations

from orchestrator import wings
from orchestrator.compose.arguments import Arguments
from orchestrator.compose.line import composed


def answer(asked: Arguments) -> int:
    """The exit code of the command. Refusal: lists everything wrong with the arguments."""
    if "--help" in asked.flags:
        print(wings.load(wings.HELP)(asked.overrides, asked.flags.get("--config-dir")))
        return 0
    composition = composed(asked)
    from orchestrator.commands import line  # imported here: a line that is refused needs none of what it imports

    return line.run(composition, asked)
