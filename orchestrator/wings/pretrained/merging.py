"""The base of a run with its adapters added, from a checkpoint of adapter=lora."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from orchestrator.wings.pretrained.adapters import adapter_weights
from orchestrator.workloads.models import build_deferred_model
from zero_runtime.checkpoint.hugging_face.lora import PREFIX, MergedLora
from zero_runtime.checkpoint.hugging_face.names import weights_for
from zero_runtime.dtypes import short_name
from zero_runtime.quantised.chosen import coded_matrices
from zero_runtime.quantised.read_back import ReadBack
from zero_runtime.tensor_source import Renamed, TensorSource
from zero_runtime.unit_planner import block_modules


class Merged(NamedTuple):
    """The weights with adapters added, and those of the base."""

    weights: MergedLora
    base: TensorSource


@contextmanager
def merged(state: TensorSource, config: Mapping[str, Any]) -> Iterator[Merged]:
    """Within it, the merged weights can be read. `state`: the masters of a checkpoint, which holds the base too where
    the run read none from a folder; a base in codes is as it is read back from them. CheckpointError if the base's
    folder has gone or is another model's."""
    model, adapter = config["model"], config["adapter"]
    path = model["path"]
    plain = build_deferred_model(model["model_type"], model["config"], as_saved=path is not None)
    settings = {"r": adapter["rank"], "lora_alpha": adapter["alpha"]}
    if path is None:
        held = {_plain(name): name for name in state.names() if "lora_" not in name}
        base: TensorSource = Renamed(state, held)
        yield Merged(MergedLora(base, adapter_weights(state), plain, settings), base)
        return
    with weights_for(path, plain) as base:
        adapters = adapter_weights(state)
        trained_on = _read_back(base, adapters, plain, config.get("precision", {}))
        yield Merged(MergedLora(trained_on, adapters, plain, settings), base)


def _read_back(base: TensorSource, adapters: TensorSource, plain: nn.Module, precision: Mapping[str, Any]) -> Any:
    """The base that the adapters were trained on. If it was stored as codes, its values are those that are read back:
    the adapters make up for the rounding, so that added to the exact weights they would be another model."""
    if (code := precision.get("weights")) is None:
        return base
    adapted = {name.partition(".lora_")[0].removeprefix(PREFIX) for name in adapters.names()}
    in_run = {_in_run(name, adapted): name for name, _ in plain.requires_grad_(False).named_parameters()}
    kept = {name for name in in_run if any(fnmatchcase(name, pattern) for pattern in precision["keep_dtype"])}
    coded = coded_matrices(plain, block_modules(plain), ()) - {in_run[name] for name in kept}
    return ReadBack(base, coded, code)


def _in_run(name: str, adapted: Collection[str]) -> str:
    """The name of a weight in the run, in which an adapted layer wraps its base."""
    path, _, last = name.rpartition(".")
    return f"{PREFIX}{path}.base_layer.{last}" if path in adapted else f"{PREFIX}{name}"


def dtype_of(base: TensorSource) -> str:
    """The short name of the dtype that holds every weight of a source."""
    found: torch.dtype | None = None
    for name in base.names():
        one = base.dtype(name)
        found = one if found is None else torch.promote_types(found, one)
    return short_name(found or torch.float32)


def _plain(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")
