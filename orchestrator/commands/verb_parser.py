"""The parser of a verb: its usage under the name that was typed, wrong words refused in one line, --json answered."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from orchestrator.config.strict import Refusal
from orchestrator.text.paths import program


class VerbParser(argparse.ArgumentParser):
    """Raises Refusal for words that are wrong; --help prints the usage and raises SystemExit with code 0."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise Refusal([f"{message}      {usage}"])


class _NoJson(argparse.Action):
    """Says why the verb has no --json. `const`: the reason."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"--json: {self.const}")


def verb_parser(name: str, text: str) -> VerbParser:
    """The parser of a verb that is alone in its module."""
    return VerbParser(prog=f"{program()} {name}", description=text)


def add_json(parser: argparse.ArgumentParser, why_not: str = "") -> None:
    """--json prints one document on stdout. `why_not`: why this verb refuses it."""
    if why_not:
        parser.add_argument("--json", action=_NoJson, nargs=0, const=why_not, help=argparse.SUPPRESS)
    else:
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout, for a program to read")
