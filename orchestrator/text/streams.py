"""Makes stdout and stderr accept any text, by spelling out characters that the encoding lacks, and control characters
in messages."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.exit_codes import BAD_USAGE

SPELLED = {"Ψ": "Psi", "Φ": "Phi", "×": "x", "·": "*", "…": "...", "–": "-", "²": "^2", "µ": "u", "≤": "<=", "≥": ">="}
HANDLER = "zlab-spelled"
MOST_SIGNS = 3000  # most characters of a message, which may quote a command line or a file of any length
MOST_MESSAGES = 50  # most messages of one kind, since every line of a file may be wrong


def take_any_text() -> None:
    """From now on, no print fails because of the stream's encoding, or because the stream was closed at the start.

    The encoding lacks characters for example under LC_ALL=C with Python's UTF-8 mode off; `>&-` closes a stream.
    """
    _open_closed()
    codecs.register_error(HANDLER, _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests and notebooks replace the streams by other classes
            stream.reconfigure(errors=HANDLER)


def complain(text: str) -> None:
    """Prints the text as one line on stderr, with control characters spelled out, since it may quote any file. Nothing
    is raised if stderr takes no more."""
    with suppress(OSError):
        print(one_line(text), file=sys.stderr)


def few(messages: Sequence[str]) -> list[str]:
    """The first MOST_MESSAGES messages, and a line with the number of the others if there are more."""
    more = len(messages) - MOST_MESSAGES
    return [*messages[:MOST_MESSAGES], *([f"and {more:,} more"] if more > 0 else [])]


def refuse(problems: Sequence[str]) -> int:
    """Prints the problems on stderr and returns the exit code of bad usage."""
    tell_torchrun("; ".join(few(problems)))
    if os.environ.get("RANK", "0") != "0":
        return BAD_USAGE  # under torchrun or srun every rank finds the same problems, and rank 0 prints them
    word = "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        word = f"\033[31m{word}\033[0m"
    with suppress(OSError):
        for problem in few(problems):
            print(f"{word} {one_line(problem)}", file=sys.stderr)
        print(f"nothing was started (exit {BAD_USAGE})", file=sys.stderr)
    return BAD_USAGE


def tell_torchrun(text: str) -> None:
    """Writes the message that torchrun shows for this rank among the failed ones. Without torchrun nothing is done."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": one_line(text), "extraInfo": {"timestamp": f"{time.time():.0f}"}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def one_line(text: str) -> str:
    """The text with line breaks and other control characters spelled out; only both ends of a long text.

    Called where messages are printed, so that code that builds a message may quote any file or argument.
    """
    if len(text) > MOST_SIGNS:
        first, last = MOST_SIGNS * 2 // 3, MOST_SIGNS // 3
        text = f"{text[:first]} ... ({len(text) - first - last} more characters) ... {text[-last:]}"
    return text if text.isprintable() else "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def _open_closed() -> None:
    """Opens the standard streams that are closed, with os.devnull as their descriptors.

    Otherwise the next file that is opened would get the descriptor and become, for example, the stdout of our children.
    """
    for number in (0, 1, 2):
        if not os.path.exists(f"/dev/fd/{number}"):
            os.open(os.devnull, os.O_RDWR)  # open returns the lowest free descriptor
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  as long as the process lives
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(SPELLED.get(sign) or ascii(sign)[1:-1] for sign in signs), error.end
