"""The base of a run with its adapters added, from a checkpoint of adapter=lora."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from orchestrator.wings.pretrained.adapters import adapter_weights
from orchestrator.workloads.models import build_deferred_model
from zero_runtime.checkpoint.hugging_face.lora import PREFIX, MergedLora
from zero_runtime.checkpoint.hugging_face.names import weights_for
from zero_runtime.dtypes import short_name
from zero_runtime.tensor_source import Renamed, TensorSource


class Merged(NamedTuple):
    """The weights with adapters added, and those of the base."""

    weights: MergedLora
    base: TensorSource


@contextmanager
def merged(state: TensorSource, config: Mapping[str, Any]) -> Iterator[Merged]:
    """Within it, the merged weights can be read. `state`: the masters of a checkpoint, which holds the base too where
    the run read none from a folder. CheckpointError if the base's folder has gone or is another model's."""
    model, adapter = config["model"], config["adapter"]
    path = model["path"]
    plain = build_deferred_model(model["model_type"], model["config"], as_saved=path is not None)
    scale = adapter["alpha"] / adapter["rank"]
    if path is None:
        held = {_plain(name): name for name in state.names() if "lora_" not in name}
        base: TensorSource = Renamed(state, held)
        yield Merged(MergedLora(base, adapter_weights(state), plain, scale), base)
        return
    with weights_for(path, plain) as base:
        yield Merged(MergedLora(base, adapter_weights(state), plain, scale), base)


def dtype_of(base: TensorSource) -> str:
    """The short name of the dtype that holds every weight of a source."""
    found: torch.dtype | None = None
    for name in base.names():
        one = base.dtype(name)
        found = one if found is None else torch.promote_types(found, one)
    return short_name(found or torch.float32)


def _plain(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")
