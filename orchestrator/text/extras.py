"""The command that installs an extra of pyproject.toml: the only place that spells it."""

from __future__ import annotations

import shlex
from pathlib import Path

from orchestrator.text.paths import CODE


def install_line(extra: str) -> str:
    """What to type for `extra`: in a checkout that of its folder, since no index has the package; else that of the
    installed package, whose extras pip reads from the disk."""
    if not (CODE / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'zero-lab[{extra}]')}"
    folder = "." if Path.cwd() == CODE else str(CODE)
    return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
