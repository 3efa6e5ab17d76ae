"""Rules between the model, its adapters, the data and the batch."""

from __future__ import annotations

import importlib.util
from typing import Any

from orchestrator import wings
from orchestrator.config import pretrained
from orchestrator.config.near import fix_of_path
from orchestrator.config.schema import Adapter, AdapterKind, Data, DataKind, Measure, Model, Tokenizer
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene
from orchestrator.text.extras import install_line
from orchestrator.text.paths import expanded

BYTE_TOKENS = 256
FROM_FILES = (DataKind.text, DataKind.pairs)  # the kinds of data that are read from data.path


def tokenizer_of(model: Model, data: Data) -> Tokenizer:
    """The tokenizer, bytes or model: auto is model if the model's folder has one and data are not synthetic."""
    if data.tokenizer is not Tokenizer.auto:
        return data.tokenizer
    return Tokenizer.model if _has_tokenizer(model) and data.kind is not DataKind.synthetic else Tokenizer.bytes


def _has_tokenizer(model: Model) -> bool:
    folder = pretrained.tokenizer_folder(model.path, model.adapter)
    return folder is not None and (folder / pretrained.TOKENIZER).exists()


def text_has_a_path(scene: Scene, data: Data) -> Broken | None:
    if data.kind not in FROM_FILES or data.path is not None:
        return None
    return Broken(f"data={data.kind} needs data.path=FILE_OR_FOLDER", "none", ("data=stdlib",))


def text_is_there(scene: Scene, data: Data, model: Model) -> Broken | None:
    if data.kind not in FROM_FILES or data.path is None:
        return None
    path = expanded(data.path)
    if path.is_file() or path.is_dir():  # a device or a pipe may never end, and cannot be read twice
        templated = tokenizer_of(model, data) is Tokenizer.model and pretrained.has_template(model.path, model.adapter)
        found: Broken | None = wings.load(wings.FIRST_RECORD)(path, str(data.kind), templated=templated)
        return found
    fixes = () if path.exists() else fix_of_path("data.path", path, also_files=True)
    return Broken(
        "data.path must be a regular file or a folder that is there",
        data.path,
        fixes or ("data=stdlib data.path=null",),
    )


def vocabulary_holds_bytes(scene: Scene, model: Model, data: Data) -> Broken | None:
    size = model.config.get("vocab_size")
    if tokenizer_of(model, data) is Tokenizer.model:
        return None
    if data.kind is DataKind.synthetic or not isinstance(size, int) or size >= BYTE_TOKENS:
        return None
    rule = f"model.config.vocab_size must be at least {BYTE_TOKENS} for data={data.kind}: one token a byte"
    return Broken(rule, str(size), (f"model.config.vocab_size={BYTE_TOKENS}", "data=synthetic"))


def kind_of_model_allows(scene: Scene, model: Model, *groups: Any) -> Broken | None:
    found: Broken | None = wings.load(wings.KINDS).problem(scene.needs_weights, model, *groups)
    return found


def weights_are_there(scene: Scene, model: Model) -> Broken | None:
    # A plan for described GPUs runs nothing, also where they are those of this machine.
    return pretrained.problem(model, needs_weights=scene.needs_weights and not (scene.plan_only and scene.found))


def tokenizer_is_there(scene: Scene, model: Model, data: Data) -> Broken | None:
    if data.tokenizer is not Tokenizer.model:
        return None
    if data.kind is DataKind.synthetic:
        return Broken("data=synthetic makes tokens and reads no text", "data.tokenizer=model", ("data.tokenizer=auto",))
    if not _has_tokenizer(model):
        found = f"no {pretrained.TOKENIZER} in {model.path}" if model.path else "no model.path"
        return Broken("data.tokenizer=model needs a model.path with a tokenizer", found, ("data.tokenizer=bytes",))
    return None


def adapter_can_be_made(scene: Scene, adapter: Adapter) -> Broken | None:
    if adapter.kind is AdapterKind.none or is_installed("peft"):
        return None
    rule = f"adapter=lora needs the package peft: {install_line('lora')}"
    return Broken(rule, "none", ("adapter=none",))


def validation_has_data(scene: Scene, data: Data, measure: Measure) -> Broken | None:
    if data.validation_fraction > 0 or measure.validation_batches == 0:
        return None
    rule = f"measure.validation_batches={measure.validation_batches} needs data.validation_fraction above 0"
    return Broken(rule, "0", ("data.validation_fraction=0.05", "measure.validation_batches=0"))


def is_installed(package: str) -> bool:
    """Whether the package is installed, found out without importing it."""
    return importlib.util.find_spec(package) is not None
