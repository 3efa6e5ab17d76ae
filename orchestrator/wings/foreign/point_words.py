"""The words that compose to a configuration: for each group the nearest option of conf/, and the keys that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.compose import folders
from orchestrator.compose.settable import with_all_keys
from orchestrator.config.parts import plain
from orchestrator.config.schema import Model, RunConfig, to_dict
from orchestrator.config.strict import hints_of
from orchestrator.wings.foreign.findings import as_word

# What resolving a configuration fills in for this machine, and what is no part of a measurement.
LEFT = (
    "output",
    "tracking",
    "cluster",
    "hardware",
    "precision.compute",
    "batch.global_size",
    "offload.folder",
    "resources.device",
    "resources.threads",
    "resources.time_limit_min",
    "resources.stuck_s",
)


def words_of_point(config: RunConfig) -> dict[str, str]:
    """The words by key, options of groups first, without those of LEFT. They compose to the configuration again."""
    if config.model.path is not None:  # the folder brings its name and architecture
        config = replace(config, model=Model("pretrained", path=config.model.path, adapter=config.model.adapter))
    words: dict[str, str] = {"seed": str(config.seed)}
    groups = [name for name, hint in hints_of(RunConfig).items() if is_dataclass(hint)]
    for group in groups:
        if group not in LEFT:
            words |= _group(group, plain(getattr(config, group)))
    kept = {key: value for key, value in words.items() if key not in LEFT}
    kept |= {"batch.global_size": "null"}
    return dict(sorted(kept.items(), key=lambda item: "." in item[0] or item[0] == "seed"))


def values_of_point(config: RunConfig) -> dict[str, str]:
    """Every key of the groups as a word, without those of LEFT and without mappings."""
    return {key: as_word(value) for key, value in _said(to_dict(config)).items() if not isinstance(value, Mapping)}


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    flat = {}
    for group, inner in values.items():
        for key, value in inner.items() if isinstance(inner, Mapping) else ((None, inner),):
            path = group if key is None else f"{group}.{key}"
            if path not in LEFT and group not in LEFT:
                flat[path] = value
    return flat


def _group(group: str, values: dict[str, Any]) -> dict[str, str]:
    names = sorted(file.stem for file in (folders.CONF / group).glob("*.yaml"))
    files = {name: folders.option_file(f"{group}/{name}", folders.config_folders(None)) for name in names}
    options = {name: _option(file) for name, file in files.items() if file is not None}
    same_kind = {name: option for name, option in options.items() if option.get("kind") == values.get("kind")}
    differences = {name: _differing(values, option) for name, option in same_kind.items()}
    best = min(differences, key=lambda option: (len(differences[option]), option))
    option = {} if best == "default" and len(differences) == 1 else {group: best}
    return option | {_path(group, key): value for key, value in differences[best].items()}


def _path(group: str, key: str) -> str:
    return f"+{group}.{key[1:]}" if key.startswith("+") else f"{group}.{key}"


def _option(file: Path) -> dict[str, Any]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return with_all_keys(f"{file.parent.name}/{file.stem}", content)


def _differing(values: Mapping[str, Any], option: Mapping[str, Any]) -> dict[str, str]:
    """The values that the option does not have. Null needs no word where the option has no such key."""
    found: dict[str, str] = {}
    for key, value in values.items():
        known = option.get(key)
        if isinstance(value, Mapping):
            inner = known if isinstance(known, Mapping) else {}
            # A plus adds a key that the option's file does not have.
            plus = {name: "" if name in inner else "+" for name in value}
            found |= {
                f"{plus[name]}{key}.{name}": as_word(one) for name, one in value.items() if inner.get(name) != one
            }
            found |= {f"{key}.{name}": "null" for name in inner if name not in value}
        elif value != known and not (value in (None, []) and key not in option):
            found[key] = as_word(value)
    return found
