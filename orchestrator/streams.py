"""stdout and stderr that take any text: a sign that the terminal's encoding lacks is spelled out."""

from __future__ import annotations

import codecs
import io
import sys

SPELLED = {"Ψ": "Psi", "Φ": "Phi", "×": "x", "·": "*", "…": "...", "–": "-", "²": "^2", "µ": "u", "≤": "<=", "≥": ">="}
HANDLER = "zlab-spelled"


def take_any_text() -> None:
    """From here on no print fails because of its encoding, as under LC_ALL=C with Python's UTF-8 mode off."""
    codecs.register_error(HANDLER, _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test's or a notebook's own may be anything
            stream.reconfigure(errors=HANDLER)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(SPELLED.get(sign) or ascii(sign)[1:-1] for sign in signs), error.end
