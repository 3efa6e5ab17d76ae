"""The name that a wrong one probably means, for messages and fixes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from orchestrator.config.strict import nearest


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """A sentence that names the most similar of the known names, after a space; empty if none is similar."""
    near = nearest(wrong, list(known))
    return f" Did you mean '{near}'?" if near else ""


def fix_of_path(key: str, path: Path, *, also_files: bool = False) -> tuple[str, ...]:
    """The override of `key` with the folder (or file) beside `path` that has the most similar name, if there is one."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    near = nearest(path.name, [one.name for one in beside if also_files or one.is_dir()])
    return (f"{key}={path.parent / near}",) if near else ()
