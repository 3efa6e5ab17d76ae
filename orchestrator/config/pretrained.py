"""Checks of a local folder of pretrained weights by its config.json, without importing torch or transformers."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import wings
from orchestrator.config.near import fix_of_path
from orchestrator.config.schema import Model
from orchestrator.config.strict import Broken
from orchestrator.text.paths import expanded
from zero_runtime.checkpoint import files
from zero_runtime.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = (files.WEIGHTS, files.WEIGHTS_INDEX)
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json")  # all that transformers needs without a config.json
# Files for the tokenizer or for generation, not weights. An export copies them.
COMPANIONS = (
    *TOKENIZER_FILES,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
    GENERATION,
)
TEMPLATES = "additional_chat_templates/*.jinja"  # one of them may be the default


def tokenizer_folder(path: str | None, adapter: str | None) -> Path | None:
    """The folder where the tokenizer of a model is, if it has one: that of its adapters if they were saved with theirs,
    which they were trained with; else that of the base. None without a `path`."""
    if adapter is not None and all((expanded(adapter) / name).exists() for name in TOKENIZER_FILES):
        return expanded(adapter)
    return None if path is None else expanded(path)


def has_template(path: str | None, adapter: str | None) -> bool:
    """Whether a chat template is beside the tokenizer of a model, in a file of its own or in the tokenizer's."""
    if (folder := tokenizer_folder(path, adapter)) is None:
        return False
    settings = folder / TOKENIZER_FILES[1]
    is_inside = settings.is_file() and b'"chat_template"' in settings.read_bytes()
    return is_inside or (folder / TEMPLATE).is_file() or any(folder.glob(TEMPLATES))


def companions(folder: Path) -> list[Path]:
    """The files of COMPANIONS and TEMPLATES that are in the folder."""
    files = [*(folder / name for name in COMPANIONS), *sorted(folder.glob(TEMPLATES))]
    return [file for file in files if file.is_file()]


def completed(model: Model) -> Model:
    """The model with name, model type and configuration filled in from its folder.

    Unchanged if no path is given, if model type or configuration is given as well, or if config.json cannot be read.
    """
    if model.path is None or model.model_type is not None or model.config:
        return model  # `problem` refuses a model type or configuration that is given in addition to a path
    path = expanded(model.path).absolute()
    if is_adapter(path):
        with_base: Model = wings.load(wings.ADAPTER_FOLDER).with_base(model, path)
        return with_base
    config = read_config(path)
    if config is None or not isinstance(config.get("model_type"), str):
        return model
    adapter = model.adapter and str(expanded(model.adapter).absolute())
    return replace(
        model, path=str(path), adapter=adapter, name=_name(path), model_type=config["model_type"], config=config
    )


def _name(path: Path) -> str:
    """That of the folder; in the hub's cache, where the folder is a revision's, that of the model."""
    return path.parent.parent.name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name


def is_adapter(path: Path) -> bool:
    """Whether a folder has adapters and no weights of a model."""
    return (path / ADAPTER).is_file() and not any((path / name).exists() for name in WEIGHTS)


def read_config(path: Path) -> dict[str, Any] | None:
    """The contents of config.json; None if it is missing or cannot be read."""
    file = path / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None  # reading a pipe may never end
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def problem(model: Model, *, needs_weights: bool = True) -> Broken | None:
    """What is wrong with `model.path`, or with a model that needs a path and has none; None if nothing is."""
    if model.adapter is not None or (model.path is not None and is_adapter(expanded(model.path))):
        broken: Broken | None = wings.load(wings.ADAPTER_FOLDER).problem(model)
        if broken is not None:
            return broken
    if model.path is None:
        if model.model_type is not None:
            return None
        return Broken("model=pretrained needs model.path=FOLDER", "none", ("model=llama_tiny",))
    path = expanded(model.path)
    if not path.is_dir():
        return Broken("model.path must be a folder that is there", model.path, fix_of_path("model.path", path))
    config = read_config(path)
    if config is None or not isinstance(config.get("model_type"), str):
        return Broken(f"model.path must hold a {CONFIG} with a model_type", f"none in {model.path}")
    if needs_weights and not any((path / name).exists() for name in WEIGHTS):
        return Broken(f"model.path must hold {' or '.join(WEIGHTS)}", f"neither in {model.path}")
    if needs_weights and (damage := _damage(path)):
        return Broken(f"model.path must hold whole weights: {damage}")
    if "quantization_config" in config:
        return Broken("model.path must hold weights that are not quantised", f"a quantization_config in {model.path}")
    if model.model_type not in (None, config["model_type"]) or (model.config and model.config != config):
        given = f"model_type {model.model_type}, {len(model.config)} keys of model.config"
        return Broken("model.path brings its own architecture", given, (f"model=pretrained model.path={model.path}",))
    return None


def _damage(path: Path) -> str:
    """What is wrong with the index or the headers of the weights; empty if nothing is. Reads them once."""
    seen = [file.stat() for file in sorted(path.glob("*.safetensors*")) if file.exists()]
    return _damage_of(path, tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in seen))


@functools.lru_cache
def _damage_of(path: Path, seen: tuple[tuple[int, int, int], ...]) -> str:
    try:
        files.check_weights(path)
    except CheckpointError as error:
        return str(error)
    return ""
