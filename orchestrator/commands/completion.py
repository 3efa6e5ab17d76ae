"""`zlab completion SHELL`: prints the shell's code for tab completion; with --line it answers for one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from orchestrator import wings
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import completion
from orchestrator.compose.arguments import VERBS
from orchestrator.compose.settable import read_tree
from orchestrator.text.paths import DEFAULT_OUTPUT, OUTPUT, program


def main(argv: Sequence[str]) -> int:
    """0: printed."""
    parsed = parser()
    asked = parsed.parse_args(argv)
    if asked.line is not None:
        known = completion.read_flags(asked.flags)
        words = completion.typed_words(asked.line)
        for candidate in completion.candidates(words, read_tree(_added(words)), known, _sweeps(words)):
            print(candidate)
        return 0
    if asked.shell is None:
        parsed.error(f"which shell? one of {' '.join(completion.SHELLS)}")
    print(completion.script(asked.shell, program(), _flags()), end="")
    return 0


def parser() -> VerbParser:
    parser = verb_parser("completion", "Shell code for tab completion; its first line says where it belongs.")
    parser.add_argument("shell", nargs="?", choices=completion.SHELLS)
    parser.add_argument("--line", help=argparse.SUPPRESS)  # what the shell's code asks for: the line up to the cursor
    parser.add_argument("--flags", default="", help=argparse.SUPPRESS)
    add_json(parser, "it is code for a shell")
    return parser


def _flags() -> dict[str, list[str]]:
    """The long flags of each verb, from its parser."""
    found: dict[str, list[str]] = {}
    for verb, place in VERBS.items():
        built: argparse.ArgumentParser = wings.load(place).parser()
        for action in built._actions:
            if isinstance(action, argparse._SubParsersAction):
                built = action.choices.get(verb, built)
        shown = [action for action in built._actions if action.help is not argparse.SUPPRESS]
        found[verb] = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
    return found


def _added(words: Sequence[str]) -> str | None:
    """The folder of --config-dir, if it is typed."""
    named = [word.partition("=")[2] for word in words[:-1] if word.startswith(("--config-dir=", "-cd="))]
    named += [after for word, after in pairwise(words) if word in ("--config-dir", "-cd")]
    return next((one for one in named if Path(one).is_dir()), None)


def _sweeps(words: Sequence[str]) -> list[str]:
    """The names of the sweeps in the output folder of the line, the oldest first."""
    named = [after for word, after in pairwise(words) if word == "--output"]
    folder = Path((named or [os.environ.get(OUTPUT, DEFAULT_OUTPUT)])[0]) / "sweeps"
    return sorted(path.name for path in folder.glob("[!.]*") if path.is_dir()) if folder.is_dir() else []
