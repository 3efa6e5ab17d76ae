"""Paths as they are shown to a person."""

from __future__ import annotations

from pathlib import Path


def shown(path: Path) -> str:
    """The path as short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
