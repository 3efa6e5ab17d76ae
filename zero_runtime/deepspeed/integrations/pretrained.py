"""Loads models of transformers from a folder of safetensors, each rank its own shards only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from zero_runtime.checkpoint.hugging_face.names import weights_for
from zero_runtime.checkpoint.hugging_face.source import WeightsFolder
from zero_runtime.deepspeed.pending_weights import expect_weights
from zero_runtime.errors import PlanError
from zero_runtime.initial_values import parameters_on_meta


def from_pretrained(model_class: Any, folder: str | Path, **settings: Any) -> Any:
    """A model of `model_class` (AutoModelForCausalLM, LlamaForCausalLM, ...) without weights, on the meta device.

    `zero_runtime.initialize`, and so the Trainer, reads the weights of `folder` into each rank's shards: no rank ever
    holds the full model, on its device or in its host's memory. settings: changes of the folder's config.json. The
    folder is one that save_pretrained wrote, with safetensors; nothing is downloaded. PlanError for another folder;
    initialize raises CheckpointError if the weights are not those of this class.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise PlanError(
            f"from_pretrained: expected a folder with config.json and safetensors, found {str(folder)!r}; download a "
            "model first (`hf download NAME --local-dir FOLDER`) and give its folder"
        )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, **settings)
    with parameters_on_meta():
        model = model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)
    WeightsFolder(path).close()  # raises now, not in initialize, if a file is missing or damaged
    expect_weights(model, partial(weights_for, path))
    return model.eval()
