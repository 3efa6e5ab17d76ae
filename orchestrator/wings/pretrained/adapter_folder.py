"""A folder of LoRA adapters, as PEFT writes it, as a model: its base with the adapters added. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.config import pretrained
from orchestrator.config.schema import Model
from orchestrator.config.strict import Broken
from orchestrator.text.paths import expanded
from orchestrator.wings.words.model_names import in_cache

WEIGHTS = "adapter_model.safetensors"
BASE = "base_model_name_or_path"
# PEFT's settings that choose layers, or first values that training then changed, or that the weights are read by: any
# value is added rightly. Their initialisations are judged by init_lora_weights.
ANY = frozenset(
    [
        *("task_type", "auto_mapping", "peft_version", BASE, "revision", "inference_mode", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "fan_in_fan_out"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),
        *("megatron_core", "qalora_group_size", "ensure_weight_tying"),  # which do nothing alone
    ]
)
# Those with values that are added rightly. The other initialisations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take a part
# out of the base, which is then another one than the folder names.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
FORMS = {"r": int, "lora_alpha": int | float, "rank_pattern": dict | None, "alpha_pattern": dict | None}
UNSET: tuple[Any, ...] = (None, False, [], {})  # the values of all other settings, also of those that a later PEFT adds


def with_base(model: Model, folder: Path) -> Model:
    """The model as its base with the adapters of `folder`; unchanged if the base is not there: see `problem`."""
    base = _base(folder)
    if base is None or not base.is_dir() or pretrained.is_adapter(base):
        return model
    return pretrained.completed(replace(model, path=str(base), adapter=str(folder)))


def problem(model: Model) -> Broken | None:
    """What is wrong with a model whose `adapter`, or whose `path`, is a folder of adapters; None if nothing is."""
    folder = expanded(model.adapter or model.path or "").absolute()
    if model.path is None:
        return Broken("model.adapter needs the folder of its base", "none", (f"model.path={folder}",))
    if not (folder / pretrained.ADAPTER).is_file():
        return Broken(
            f"model.adapter must be a folder with {pretrained.ADAPTER}, as PEFT writes it", model.adapter or ""
        )
    settings = _settings(folder)
    if settings is None or not all(isinstance(settings.get(key), form) for key, form in FORMS.items()):
        return Broken(f"{pretrained.ADAPTER} must hold the settings of LoRA", f"others in {folder}")
    for key, value in ({"peft_type": None} | settings).items():
        if key not in ANY and value not in ONLY.get(key, UNSET):
            rule = f"{folder} must hold plain LoRA; merge it with PEFT's merge_and_unload, and give the folder it saves"
            return Broken(rule, f"{key}={value}")
    if not (folder / WEIGHTS).is_file():
        return Broken(f"{folder} must hold {WEIGHTS}", "none; save it again with safe_serialization=True")
    if model.adapter is None:
        return _without_base(settings.get(BASE), folder)
    return _other_tokens(model, folder)


def _other_tokens(model: Model, folder: Path) -> Broken | None:
    """Why the tokenizer that was saved with the adapters is not one of their base; None if it may be, or there is none.
    It may have fewer tokens than the model has rows, which are often filled up to a round number."""
    rows = model.config.get("vocab_size")
    if pretrained.tokenizer_folder(None, str(folder)) is None or not isinstance(rows, int):
        return None
    most = _last_token(file := folder / pretrained.TOKENIZER, file.stat().st_mtime_ns)
    if most is not None and most < rows:
        return None
    rule = f"{file} must be a tokenizer of the base, whose vocab_size is {rows}; take it away to use the base's own"
    return Broken(rule, "none that can be read" if most is None else f"a token {most}")


@lru_cache  # each point of a sweep asks, and the file may have 10 MB
def _last_token(file: Path, stamp: int) -> int | None:
    """The largest token id of a tokenizer.json; None if it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        words = found["model"]["vocab"]  # of token to id, or a list in the order of the ids
        ids = [*words.values()] if isinstance(words, dict) else [len(words) - 1]
        return int(max([*ids, *(one["id"] for one in found["added_tokens"])]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _without_base(name: object, folder: Path) -> Broken:
    rule = f"the base of the adapters in {folder} must be a folder on this disk, or in the hub's cache"
    fix = (f"model.path=FOLDER_OF_THE_BASE model.adapter={folder}",)
    if not isinstance(name, str) or not name:
        return Broken(rule, f"no {BASE} in {pretrained.ADAPTER}", fix)
    if Path(name).is_absolute() or name.count("/") != 1:
        return Broken(rule, name, fix)
    return Broken(f"{rule} (hf download {name})", f"the name {name}", fix)


def _base(folder: Path) -> Path | None:
    settings = _settings(folder) or {}
    name, revision = settings.get(BASE), settings.get("revision")
    if not isinstance(name, str) or not name:
        return None
    path = expanded(name).absolute()
    return path if path.is_dir() else in_cache(name, revision if isinstance(revision, str) else None) or path


def _settings(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / pretrained.ADAPTER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
