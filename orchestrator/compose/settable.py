"""The settings that a command line may change: option groups with their files, and keys with their types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.compose.folders import config_folders, sweep_parents
from orchestrator.config.engine import EngineChoice
from orchestrator.config.parts import completed
from orchestrator.config.schema import AskedConfig
from orchestrator.config.strict import hints_of
from orchestrator.wings import ENGINES

WHOLE_FILES = ("experiment", "sweeps")  # groups whose files change the whole configuration
# Mappings with keys of other programs: the architecture's (from the files of conf/model), torch.optim's, sbatch's and
# those of other engines.
ARCHITECTURE = "model.config"
NATIVE = tuple(f"engine.{one.name}" for one in fields(EngineChoice) if one.name in ENGINES)
OPEN_KEYS = (ARCHITECTURE, "optimizer.arguments", "cluster.additional", *NATIVE)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that of the C library is faster, and not always there


@dataclass(frozen=True)
class Tree:
    """The settings: `groups` with their options, and the dotted `keys` with their types."""

    groups: dict[str, tuple[str, ...]]
    keys: dict[str, Any]


def read_tree(added: str | None = None) -> Tree:
    """The settings of all configuration folders; `added` is the folder given with --config-dir."""
    folders = config_folders(added)
    hints = hints_of(AskedConfig)
    names = [name for name, hint in hints.items() if is_dataclass(hint)] + [WHOLE_FILES[0]]
    groups = {name: _options(folder / name for folder in folders) for name in names}
    groups["sweeps"] = _options(folder / "sweeps" for folder in sweep_parents(added))
    keys: dict[str, Any] = {name: hint for name, hint in hints.items() if name not in groups}
    for group, hint in hints.items():
        if is_dataclass(hint) and isinstance(hint, type):
            keys |= {f"{group}.{key}": kind for key, kind in hints_of(hint).items()}
    keys |= dict.fromkeys(_architecture_keys(folder / "model" for folder in folders), Any)
    return Tree(groups, keys)


def with_all_keys(file: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an option file, such as `optimizer/adamw`, with the keys of its group that it leaves out.

    A command line can then override them, and a configuration that is shown has every key.
    """
    group = hints_of(AskedConfig).get(file.partition("/")[0])
    return completed(group, values) if isinstance(group, type) and is_dataclass(group) else dict(values)


def is_native(key: str) -> bool:
    """Whether it is a key of another engine. No file has one, so they need no + to be added."""
    return key.startswith(tuple(f"{one}." for one in NATIVE))


def for_hydra(word: str) -> str:
    """The word with the ++ that Hydra wants before a key that may be in no file."""
    return f"++{word}" if is_native(word.partition("=")[0]) else word


def _options(folders: Iterable[Path]) -> tuple[str, ...]:
    return tuple(sorted({file.stem for folder in folders for file in folder.glob("*.yaml")}))


def _architecture_keys(folders: Iterable[Path]) -> Iterator[str]:
    """The keys under model.config in any file of conf/model."""
    for file in (file for folder in folders for file in sorted(folder.glob("*.yaml")) if file.is_file()):
        yield from (f"{ARCHITECTURE}.{key}" for key in _config_of(file))


def _config_of(file: Path) -> Iterable[object]:
    """The keys of the file's `config`; empty for a broken file, whose problem composing it reports."""
    try:
        return list(yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)["config"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
        return []
