"""Maps the tensors of a weights folder to the parameters of a model."""

from __future__ import annotations

import re

from torch import nn

from zero_runtime.checkpoint.hugging_face.source import Renamed, WeightsFolder, match_names

# Tensors that older versions of transformers saved although models compute them: causal masks, rotary frequencies.
_NEEDED_BY_NONE = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$")


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
