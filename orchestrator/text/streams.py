"""stdout and stderr that take any text: a sign that the terminal's encoding lacks is spelled out, and so is one that a
terminal would obey."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Sequence

from orchestrator.exit_codes import BAD_USAGE

SPELLED = {"Ψ": "Psi", "Φ": "Phi", "×": "x", "·": "*", "…": "...", "–": "-", "²": "^2", "µ": "u", "≤": "<=", "≥": ">="}
HANDLER = "zlab-spelled"
MOST_SIGNS = 3000  # of a message: what was typed, or a file's text, may be as long as it likes
MOST_MESSAGES = 50  # of one kind: a file may be wrong in every line


def take_any_text() -> None:
    """From here on no print fails because of its encoding, as under LC_ALL=C with Python's UTF-8 mode off, or because
    its stream was closed before the program began (`>&-`)."""
    _open_closed()
    codecs.register_error(HANDLER, _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test's or a notebook's own may be anything
            stream.reconfigure(errors=HANDLER)


def complain(text: str) -> None:
    """One line on stderr, whatever the text holds: it may quote what a stranger's file says."""
    print(one_line(text), file=sys.stderr)


def few(messages: Sequence[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(messages) - MOST_MESSAGES
    return [*messages[:MOST_MESSAGES], *([f"and {more:,} more"] if more > 0 else [])]


def refuse(problems: Sequence[str]) -> int:
    """Tells every problem on stderr; the exit code of bad usage."""
    word = "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        word = f"\033[31m{word}\033[0m"
    # Started by torchrun or srun, every rank finds the same: one tells it.
    for problem in few(problems) if os.environ.get("RANK", "0") == "0" else ():
        print(f"{word} {one_line(problem)}", file=sys.stderr)
    print(f"nothing was started (exit {BAD_USAGE})", file=sys.stderr)
    return BAD_USAGE


def one_line(text: str) -> str:
    """The text with line breaks and other signs that steer a terminal spelled out; of a long one both ends."""
    if len(text) > MOST_SIGNS:
        first, last = MOST_SIGNS * 2 // 3, MOST_SIGNS // 3
        text = f"{text[:first]} ... ({len(text) - first - last} more characters) ... {text[-last:]}"
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _open_closed() -> None:
    """Also the descriptors: the next file that is opened would be the stdout of our children."""
    for number in (0, 1, 2):
        if not os.path.exists(f"/dev/fd/{number}"):
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  as long as the process lives
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(SPELLED.get(sign) or ascii(sign)[1:-1] for sign in signs), error.end
