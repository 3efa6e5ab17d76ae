"""The argument parser of a verb: usage under the typed program name, errors refused in one line, and --json."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from orchestrator.config.strict import Refusal
from orchestrator.text.paths import DEFAULT_OUTPUT, OUTPUT, program

THRESHOLD = 0.05


class VerbParser(argparse.ArgumentParser):
    """Raises Refusal for wrong arguments; --help prints the usage and raises SystemExit with code 0."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise Refusal([f"{message}      {usage}"])


class RefusedFlag(argparse.Action):
    """Refuses a flag with the reason, or what to do instead, stored in `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        raise Refusal([f"{option_string}: {self.const}"])


def verb_parser(name: str, text: str) -> VerbParser:
    """The parser of a verb that has a separate module."""
    return VerbParser(prog=f"{program()} {name}", description=text)


def with_flags(argv: Sequence[str]) -> list[str]:
    """The words of a verb without settings, with output=FOLDER, as a run takes it, as the flag --output=FOLDER."""
    return [f"--{word}" if word.startswith("output=") else word for word in argv]


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds --output, for a verb that reads an output folder."""
    default = os.environ.get(OUTPUT, DEFAULT_OUTPUT)
    parser.add_argument("--output", default=default, help=f"the folder of the runs; default: {default}")


def add_json(parser: argparse.ArgumentParser, why_not: str = "") -> None:
    """Adds --json, which prints one document to stdout. `why_not`: the reason why this verb rejects it."""
    if why_not:
        parser.add_argument("--json", action=RefusedFlag, nargs=0, const=why_not, help=argparse.SUPPRESS)
    else:
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout, for a program to read")


def add_threshold(parser: argparse.ArgumentParser) -> None:
    """The flag for the change that must be found."""
    text = "the growth of a token's time, or of memory, that is to be found, such as 5%%; default: 5%%"
    parser.add_argument("--threshold", type=_share, default=THRESHOLD, metavar="SHARE", help=text)


def _share(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?(%?)", text.strip())
    value = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 5% or 0.05, found {text!r}")
    return value
