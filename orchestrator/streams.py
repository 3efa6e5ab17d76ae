"""stdout and stderr that take any text: a sign that the terminal's encoding lacks is spelled out."""

from __future__ import annotations

import codecs
import io
import os
import sys

SPELLED = {"Ψ": "Psi", "Φ": "Phi", "×": "x", "·": "*", "…": "...", "–": "-", "²": "^2", "µ": "u", "≤": "<=", "≥": ">="}
HANDLER = "zlab-spelled"


def take_any_text() -> None:
    """From here on no print fails because of its encoding, as under LC_ALL=C with Python's UTF-8 mode off, or because
    its stream was closed before the program began (`>&-`)."""
    _open_closed()
    codecs.register_error(HANDLER, _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test's or a notebook's own may be anything
            stream.reconfigure(errors=HANDLER)


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
