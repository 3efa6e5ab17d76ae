"""Loads models of transformers from a folder of safetensors, each rank its own shards only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zero_runtime.checkpoint.hugging_face.source import Renamed, WeightsFolder, match_names
from zero_runtime.deepspeed.pending_weights import expect_weights
from zero_runtime.errors import PlanError
from zero_runtime.initial_values import parameters_on_meta

# Tensors that older versions of transformers saved although models compute them: causal masks, rotary frequencies.
_NEEDED_BY_NONE = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$")


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
    expect_weights(model, partial(_opened, path))
    return model.eval()


@contextmanager
def _opened(path: Path, model: nn.Module) -> Iterator[Renamed]:
    with WeightsFolder(path) as folder:
        yield weights_of(folder, model)


def weights_of(folder: WeightsFolder, model: nn.Module) -> Renamed:
    """The folder's weights under the names of `model`, an architecture of transformers or PEFT's wrapper of one.

    A folder may use any name of a tied weight, may hold the bare model, whose names lack the head model's prefix, and
    contains no adapters, which get no values. The model's persistent buffers are filled here. CheckpointError if a
    weight is missing or left over.
    """
    inner = next((module for module in model.modules() if hasattr(type(module), "base_model_prefix")), model)
    prefix = f"{getattr(inner, 'base_model_prefix', '')}."
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if "lora_" not in name and not _is_dropped(model, name):
            # The names under which a folder may store this tensor.
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            names.setdefault(id(tensor), []).extend([name, plain, plain.removeprefix(prefix), f"{prefix}{plain}"])
    own = {aliases[0]: aliases for aliases in names.values()}
    known = {alias for aliases in own.values() for alias in aliases}
    unused = (*_NEEDED_BY_NONE, *(getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()))
    theirs = [
        name for name in folder.names() if name in known or not any(re.search(pattern, name) for pattern in unused)
    ]
    matches = match_names(own, theirs, str(folder.path))
    buffers = dict(model.named_buffers())
    for name in matches.keys() & buffers.keys():
        buffers[name].copy_(folder.read(matches[name], 0, buffers[name].numel()).view(buffers[name].shape))
    return Renamed(folder, {name: alias for name, alias in matches.items() if name not in buffers})


def _is_dropped(model: nn.Module, name: str) -> bool:
    """Whether the name belongs to a buffer that is not saved with the model."""
    path, _, key = name.rpartition(".")
    return key in model.get_submodule(path)._non_persistent_buffers_set
