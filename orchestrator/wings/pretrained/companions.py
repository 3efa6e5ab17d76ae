"""Writes the files next to a run's weights in a Hugging Face folder: the model's configuration and the tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.pretrained import GENERATION, TOKENIZER, companions, tokenizer_folder


def write_companions(out: Path, config: Mapping[str, Any], dtype: str) -> str:
    """Writes configuration and tokenizer next to a run's weights. Returns a description of the tokenizer."""
    from orchestrator.wings.pairs.windows import BYTE_END
    from orchestrator.wings.pretrained.tokenizer import save_byte_tokenizer
    from orchestrator.workloads.models import saved_config
    from zero_runtime.dtypes import TORCH_DTYPE

    model, data = config["model"], config.get("data", {})
    path = model.get("path")
    settings = saved_config(model["model_type"], model["config"], TORCH_DTYPE[dtype], as_saved=path is not None)
    folder = tokenizer_folder(path, model.get("adapter"))
    copies: dict[str, Path] = {}
    if folder is not None and path is not None:
        copies = {GENERATION: Path(path) / GENERATION}  # which adapters come without
        copies |= {str(file.relative_to(folder)): file for file in companions(folder)}
    for name, file in copies.items():
        if file.is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, out / name)
    of_bytes = TOKENIZER not in copies and data.get("tokenizer") == "bytes" and data.get("kind") != "synthetic"
    if of_bytes:
        settings.eos_token_id = BYTE_END
    settings.save_pretrained(out)
    if TOKENIZER in copies:
        return f"tokenizer of {folder}"
    if of_bytes:
        save_byte_tokenizer(out)
        return "a tokenizer of bytes, on which it was trained"
    return "no tokenizer: " + ("its data was synthetic" if data.get("kind") == "synthetic" else "none is known")
