"""The names of a folder's weights and those of a model: which tensor is which parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from zero_runtime.checkpoint.hugging_face.lora import AdapterFolder, added
from zero_runtime.checkpoint.hugging_face.source import WeightsFolder
from zero_runtime.errors import CheckpointError, some
from zero_runtime.tensor_source import Renamed, TensorSource

# Tensors that older versions of transformers saved although models compute them: causal masks, rotary frequencies.
_NEEDED_BY_NONE = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$")


@contextmanager
def weights_for(path: str | Path, model: nn.Module, adapter: str | Path | None = None) -> Iterator[TensorSource]:
    """Context with the folder's weights under the names of `model`; see weights_of. `adapter`: a folder of PEFT whose
    adapters are added to them; CheckpointError for those that `model` has no place for."""
    with WeightsFolder(path) as folder:
        weights = weights_of(folder, model)
        if adapter is None:
            yield weights
            return
        adapters = AdapterFolder(adapter)
        with adapters:
            yield added(weights, adapters, model)


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
    # Of a model whose names in files differ from those in memory: how it reads a file's name.
    own_names = getattr(inner, "own_names", lambda names: names)
    stored = dict(zip(own_names(folder.names()), folder.names(), strict=True))
    theirs = [name for name in stored if name in known or not any(re.search(pattern, name) for pattern in unused)]
    matches = {name: stored[alias] for name, alias in match_names(own, theirs, str(folder.path)).items()}
    buffers = dict(model.named_buffers())
    for name in matches.keys() & buffers.keys():
        buffers[name].copy_(folder.read(matches[name], 0, buffers[name].numel()).view(buffers[name].shape))
    return Renamed(folder, {name: alias for name, alias in matches.items() if name not in buffers})


def _is_dropped(model: nn.Module, name: str) -> bool:
    """Whether the name belongs to a buffer that is not saved with the model."""
    path, _, key = name.rpartition(".")
    return key in model.get_submodule(path)._non_persistent_buffers_set


def match_names(own: Mapping[str, Sequence[str]], theirs: Iterable[str], where: str) -> dict[str, str]:
    """Map our parameter names to the names in `theirs`: {ours: theirs}.

    `own`: by parameter, the names that it may have there, in order of preference. CheckpointError if a parameter has no
    match, or if `theirs` has names that match no parameter: unused weights are a sign of another architecture.
    """
    left = dict.fromkeys(theirs)
    known = {alias for aliases in own.values() for alias in aliases}
    found = {name: next((alias for alias in aliases if alias in left), None) for name, aliases in own.items()}
    missing = [name for name, alias in found.items() if alias is None]
    extra = [name for name in left if name not in known]
    if missing or extra:
        raise CheckpointError(
            f"{where}: another architecture: expected the {len(own)} tensors of this model, found {len(left)}; it "
            f"lacks {some(missing)} and has {some(extra)} too many; give the folder of a model of this class, whose "
            "names save_pretrained left as they are in the model"
        )
    return {name: alias for name, alias in found.items() if alias is not None}
