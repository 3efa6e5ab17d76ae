"""The argument parser of a verb: usage under the typed program name, errors refused in one line, and --json."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from orchestrator.config.strict import Refusal
from orchestrator.text.paths import program


class VerbParser(argparse.ArgumentParser):
    """Raises Refusal for wrong arguments; --help prints the usage and raises SystemExit with code 0."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise Refusal([f"{message}      {usage}"])


class _NoJson(argparse.Action):
    """Rejects --json with a reason, stored in `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"--json: {self.const}")


def verb_parser(name: str, text: str) -> VerbParser:
    """The parser of a verb that has a separate module."""
    return VerbParser(prog=f"{program()} {name}", description=text)


def add_json(parser: argparse.ArgumentParser, why_not: str = "") -> None:
    """Adds --json, which prints one document to stdout. `why_not`: the reason why this verb rejects it."""
    if why_not:
        parser.add_argument("--json", action=_NoJson, nargs=0, const=why_not, help=argparse.SUPPRESS)
    else:
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout, for a program to read")
