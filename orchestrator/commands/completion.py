"""`zlab completion SHELL`: prints the shell's code for tab completion; with --line it answers for one line."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
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
        words = completion.typed_words(asked.line)
        tree, sweeps = read_tree(_value(words[:-1], "--config-dir", "-cd") or None), _sweeps(words)
        names, labels = [sweep.name for sweep in sweeps], partial(_labels, sweeps)
        for candidate in completion.candidates(words, tree, json.loads(asked.taken), names, labels):
            print(candidate)
        return 0
    if asked.shell is None:
        parsed.error(f"which shell? one of {' '.join(completion.SHELLS)}")
    print(completion.script(asked.shell, program(), _taken()), end="")
    return 0


def parser() -> VerbParser:
    parser = verb_parser("completion", "Shell code for tab completion; its first line says where it belongs.")
    parser.add_argument("shell", nargs="?", choices=completion.SHELLS)
    parser.add_argument("--line", help=argparse.SUPPRESS)  # what the shell's code asks for: the line up to the cursor
    parser.add_argument("--taken", default="{}", help=argparse.SUPPRESS)
    add_json(parser, "it is code for a shell")
    return parser


def _taken() -> dict[str, dict[str, list[str] | None]]:
    """What each verb takes, from its parser; settings, if its usage names them."""
    found: dict[str, dict[str, list[str] | None]] = {}
    for verb, place in VERBS.items():
        built: argparse.ArgumentParser = wings.load(place).parser()
        for action in built._actions:
            if isinstance(action, argparse._SubParsersAction):
                built = action.choices.get(verb, built)
        shown = [action for action in built._actions if action.help is not argparse.SUPPRESS]
        values = {name: [*map(str, one.choices or ())] for one in shown for name in _names(one) if one.nargs != 0}
        found[verb] = {name: values.get(name) for one in shown for name in _names(one)}
        found[verb] |= {completion.SETTINGS: []} if completion.SETTINGS in (built.usage or "") else {}
    return found


def _names(action: argparse.Action) -> list[str]:
    """The long flags of an action, or the name of an argument as `completion.Taken` has it."""
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    return flags or [f"{action.dest}{'*' if action.nargs == '*' else ''}"]


def _value(words: Sequence[str], *flags: str) -> str:
    """The value that the words give to one of the flags; empty if they give none."""
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    return next((after for flag, after in pairwise(parts) if flag in flags), "")


def _sweeps(words: Sequence[str]) -> list[Path]:
    """The folders of the sweeps in the output folder of the line, the oldest first."""
    output = _value(words, "--output") or os.environ.get(OUTPUT, DEFAULT_OUTPUT)
    return sorted(path for path in Path(output).glob("sweeps/[!.]*") if path.is_dir())


def _labels(sweeps: Sequence[Path], name: str) -> list[str]:
    """The labels of the points of a sweep, which is named as for `find_sweep`."""
    from orchestrator.records import sweep_record  # imported here: most words need none of it

    named = [sweep for sweep in sweeps if name == "last" or name in sweep.name]
    return [point.label for point in sweep_record.plan_of(sweep_record.SweepPaths(named[-1]))] if named else []
