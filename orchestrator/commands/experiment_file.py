"""Writes the words of a run as a file of the group `experiment`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrator.compose import folders

FOLDER = "experiment"


def write_experiment(folder: Path, words: Sequence[str], why: str, prefix: str = "chosen") -> str:
    """Writes `folder`/experiment/NAME.yaml, which `--config-dir FOLDER experiment=NAME` runs. Returns NAME.

    The name is `prefix` and a hash of the words: the same words give the same file.
    """
    pairs = [word.lstrip("+").partition("=")[::2] for word in words]
    groups = {key: value for key, value in pairs if (folders.CONF / key).is_dir()}
    settings: dict[str, Any] = {}
    for key, value in pairs:
        if key not in groups:
            *outer, last = key.split(".")
            inner = settings
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = yaml.safe_load(value)
    name = f"{prefix}_{hashlib.sha256(' '.join(sorted(words)).encode()).hexdigest()[:8]}"
    content: dict[str, Any] = {"defaults": [{f"override /{group}": option} for group, option in groups.items()]}
    text = f"# @package _global_\n# {why}\n{yaml.safe_dump({**content, **settings}, sort_keys=False)}"
    path = folder / FOLDER / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return name
