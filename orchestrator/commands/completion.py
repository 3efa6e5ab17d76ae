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
        sweeps = _sweeps(words)
        known = json.loads(asked.taken)
        labels = partial(_labels, sweeps)
        names = [sweep.name for sweep in sweeps]
        for candidate in completion.candidates(words, read_tree(_added(words)), known, names, labels):
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
        found[verb] = {name: _values(action) for action in shown for name in _names(action)}
        found[verb] |= {completion.SETTINGS: []} if completion.SETTINGS in (built.usage or "") else {}
    return found


def _names(action: argparse.Action) -> list[str]:
    """The long flags of an action, or the name of an argument as `completion.Taken` has it."""
    if action.option_strings:
        return [flag for flag in action.option_strings if flag.startswith("--")]
    return [f"{action.dest}{'*' if action.nargs == '*' else ''}"]


def _values(action: argparse.Action) -> list[str] | None:
    return None if action.nargs == 0 else [str(choice) for choice in action.choices or ()]


def _added(words: Sequence[str]) -> str | None:
    """The folder of --config-dir, if it is typed."""
    named = [word.partition("=")[2] for word in words[:-1] if word.startswith(("--config-dir=", "-cd="))]
    named += [after for word, after in pairwise(words) if word in ("--config-dir", "-cd")]
    return next((one for one in named if Path(one).is_dir()), None)


def _sweeps(words: Sequence[str]) -> list[Path]:
    """The folders of the sweeps in the output folder of the line, the oldest first."""
    output = dict(pairwise(words)).get("--output") or os.environ.get(OUTPUT, DEFAULT_OUTPUT)
    return sorted(path for path in Path(output).glob("sweeps/[!.]*") if path.is_dir())


def _labels(sweeps: Sequence[Path], name: str) -> list[str]:
    """The labels of the points of a sweep, which is named as for `find_sweep`."""
    from orchestrator.records import sweep_record  # imported here: most words need none of it

    named = [sweep for sweep in sweeps if name == "last" or name in sweep.name]
    return [point.label for point in sweep_record.plan_of(sweep_record.SweepPaths(named[-1]))] if named else []
