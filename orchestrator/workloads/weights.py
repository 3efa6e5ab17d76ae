"""Which tensor of a folder of weights is which parameter of a model."""

from __future__ import annotations

import re

from torch import nn

from zero_runtime.checkpoint.hugging_face.source import Renamed, WeightsFolder, match_names

# Tensors that older versions of transformers saved: causal masks and rotary frequencies, which models compute.
_NEEDED_BY_NONE = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$")


def weights_of(folder: WeightsFolder, model: nn.Module) -> Renamed:
    """The folder's weights by the names of `model`, an architecture of transformers or PEFT's wrapper of one.

    Folders name a tied weight as they like, may be of the bare model without its head's prefix, and know nothing of
    adapters, which stay without values. Buffers of the model that are saved with it are filled here. CheckpointError
    where a weight is missing or left over.
    """
    inner = next((one for one in model.modules() if hasattr(type(one), "base_model_prefix")), model)
    prefix = f"{getattr(inner, 'base_model_prefix', '')}."
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if "lora_" not in name and not _is_dropped(model, name):
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            names.setdefault(id(tensor), []).extend([name, plain, plain.removeprefix(prefix), f"{prefix}{plain}"])
    own = {aliases[0]: aliases for aliases in names.values()}
    known = {alias for aliases in own.values() for alias in aliases}
    unused = (*_NEEDED_BY_NONE, *(getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()))
    theirs = [name for name in folder.names() if name in known or not any(re.search(one, name) for one in unused)]
    found = match_names(own, theirs, str(folder.path))
    buffers = dict(model.named_buffers())
    for name in found.keys() & buffers.keys():
        buffers[name].copy_(folder.read(found[name], 0, buffers[name].numel()).view(buffers[name].shape))
    return Renamed(folder, {name: alias for name, alias in found.items() if name not in buffers})


def _is_dropped(model: nn.Module, name: str) -> bool:
    """Whether a name is of a buffer that is not saved with the model."""
    path, _, key = name.rpartition(".")
    return key in model.get_submodule(path)._non_persistent_buffers_set
