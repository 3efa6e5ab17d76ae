"""Writes what save_16bit_model writes: safetensors files and the module's configuration, or one file of torch.save."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.checkpoint.hugging_face.gathered import save_gathered_weights
from zero_runtime.deepspeed.full_state import full_state
from zero_runtime.errors import PlanError
from zero_runtime.runtime import ZeroRuntime

CONFIG = "config.json"
_SUFFIX = ".safetensors"
_PICKLED = (".pt", ".pth")


def save_16bit(runtime: ZeroRuntime, folder: Path, file_name: str) -> None:
    """See Engine.save_16bit_model. CheckpointError, the same on every rank, if the folder cannot be written."""
    dtype = torch.float16 if runtime.precision.param == "fp16" else torch.bfloat16
    if Path(file_name).suffix in _PICKLED and Path(file_name).name == file_name:
        _save_pickled(runtime, folder / file_name, dtype)
        return
    stem = _stem_of(file_name)
    made = folder / f".{stem}.new"  # inside `folder`, so that moving a file out of it is a rename

    def move_in() -> None:
        if runtime.collectives.rank != 0:
            return
        # An earlier save may have had another number of files, so replacing files of the same name is not enough.
        for old in (*folder.glob(f"{stem}-*-of-*{_SUFFIX}"), *folder.glob(f"{stem}{_SUFFIX}*")):
            old.unlink()
        for file in made.iterdir():
            os.replace(file, folder / file.name)
        made.rmdir()
        config = model_config(runtime.model, dtype)
        if config is not None:
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    if runtime.collectives.rank == 0:
        shutil.rmtree(made, ignore_errors=True)  # left by a save that was killed
    save_gathered_weights(runtime, made, dtype=dtype, stem=stem)
    agree(runtime.collectives, trouble_of(move_in))


def _save_pickled(runtime: ZeroRuntime, path: Path, dtype: torch.dtype) -> None:
    """Write the state dict with torch.save, as DeepSpeed does; rank 0 holds all of it meanwhile."""
    state = full_state(runtime, kept=runtime.collectives.rank == 0, dtype=dtype)

    def write() -> None:
        if runtime.collectives.rank != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f".{path.name}.new")
        torch.save(state, made)
        os.replace(made, path)

    agree(runtime.collectives, trouble_of(write))


def model_config(module: nn.Module, dtype: torch.dtype) -> dict[str, Any] | None:
    """The config.json of a Hugging Face model with weights in `dtype`; None if the module's `config` is missing or of
    another kind."""
    to_text = getattr(getattr(module, "config", None), "to_json_string", None)
    if to_text is None:
        return None
    config: dict[str, Any] = json.loads(to_text())
    config["architectures"] = [type(module).__name__]
    config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def _stem_of(file_name: str) -> str:
    """The prefix of the file names: "model" for DeepSpeed's usual name."""
    stem = "model" if file_name == "pytorch_model.bin" else file_name.removesuffix(_SUFFIX).removesuffix(".bin")
    if Path(stem).name != stem or not stem or (stem == file_name and file_name != "model"):
        raise PlanError(
            f"engine.save_16bit_model: expected the name of a file that ends in {_SUFFIX}, .pt or .pth (or in .bin, "
            f"for which a file in {_SUFFIX} is written), found {file_name!r}"
        )
    return stem
