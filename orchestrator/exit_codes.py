"""The exit codes of every command (docs/sweeps.md)."""

from __future__ import annotations

OK = 0
FAILED = 1
BAD_USAGE = 2
INCOMPLETE = 3
NOTHING_FITS = 4
INTERRUPTED = 130
