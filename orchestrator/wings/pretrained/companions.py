"""Writes the files next to a run's weights in a Hugging Face folder: the model's configuration and the tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.pretrained import TOKENIZER, companions


def write_companions(out: Path, config: Mapping[str, Any], dtype: str) -> str:
    """Writes configuration and tokenizer next to a run's weights. Returns a description of the tokenizer."""
    from orchestrator.wings.pretrained.tokenizer import save_byte_tokenizer
    from orchestrator.workloads.models import saved_config
    from zero_runtime.dtypes import TORCH_DTYPE

    model, data = config["model"], config.get("data", {})
    path = model.get("path")
    saved_config(model["model_type"], model["config"], TORCH_DTYPE[dtype], as_saved=path is not None).save_pretrained(
        out
    )
    names = [str(file.relative_to(path)) for file in companions(Path(path))] if path is not None else []
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(path) / name, out / name)
    if TOKENIZER in names:
        return f"tokenizer of {path}"
    if data.get("tokenizer") == "bytes" and data.get("kind") != "synthetic":
        save_byte_tokenizer(out)
        return "a tokenizer of bytes, on which it was trained"
    return "no tokenizer: " + ("its data was synthetic" if data.get("kind") == "synthetic" else "none is known")
