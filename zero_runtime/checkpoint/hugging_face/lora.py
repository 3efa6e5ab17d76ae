"""The weights of a model with its LoRA adapters added, by range: W + scale * B @ A, computed in fp32."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_runtime.checkpoint.hugging_face.source import WeightsFolder
from zero_runtime.checkpoint.tensor_file import TensorFile
from zero_runtime.errors import CheckpointError, some
from zero_runtime.tensor_source import TensorSource

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's wrapper of a model
_MERGE = "merge such an adapter with PEFT's merge_and_unload, and give the folder that it saves"


class _Pair(NamedTuple):
    """The names of A [r, inputs] and of B [outputs, r]. `transposed`: the weight that they change is [inputs, outputs],
    as of an embedding or of a Conv1D of transformers."""

    a: str
    b: str
    transposed: bool


class MergedLora:
    """`base` with `adapters` added, under the names of `model`: a TensorSource.

    `base` has each parameter of `model` under one of its names; `model` may be on the meta device. `adapters` has names
    of PEFT's files. What is not of LoRA in it (PEFT's modules_to_save) takes the place of the base's. `settings`: those
    of PEFT's adapter_config.json, which decide the scale of each layer. `untied`: a tied weight has an adapter under
    one of its names, so that its names now have different values: each is a tensor here. CheckpointError if an adapter
    has no layer in the model, or another rank than the settings say, or is more than A and B.
    """

    def __init__(
        self, base: TensorSource, adapters: TensorSource, model: nn.Module, settings: Mapping[str, Any]
    ) -> None:
        self._base, self._adapters = base, adapters
        names: dict[int, list[str]] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
        aliases = {name: group for group in names.values() for name in group}
        self._pairs, self._replaced = _parts(adapters, model)
        touched = self._pairs.keys() | self._replaced.keys()
        if unknown := sorted(touched - aliases.keys()):
            raise CheckpointError(
                f"adapter: expected adapters of the base's layers, found {some(unknown)}, which it has not; give the "
                "folder of the model that the adapter was trained on"
            )
        self._stored: dict[str, str] = {}  # by our name, that of the base
        self.untied = False
        for name in base.names():
            group = aliases[name]
            apart = len(group) > 1 and not touched.isdisjoint(group)
            self.untied |= apart
            self._stored |= dict.fromkeys(group if apart else [name], name)
        self._check_shapes()
        self._scales = {name: _scale(settings, name, adapters.shape(pair.a)[0]) for name, pair in self._pairs.items()}

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(self._stored[name])

    def dtype(self, name: str) -> torch.dtype:
        if name in self._pairs:
            return torch.float32
        source, at = self._place(name)
        return source.dtype(at)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        source, at = self._place(name)
        values = source.read(at, start, stop)
        if name not in self._pairs:
            return values
        columns = self.shape(name)[1]
        first, last = start // columns, -(-stop // columns)
        rows = self._product(self._pairs[name], first, last) * self._scales[name]
        return values.float().add_(rows.reshape(-1)[start - first * columns : stop - first * columns])

    def _place(self, name: str) -> tuple[TensorSource, str]:
        if name in self._replaced:
            return self._adapters, self._replaced[name]
        return self._base, self._stored[name]

    def _product(self, pair: _Pair, first: int, last: int) -> torch.Tensor:
        """The rows first .. last - 1 of B @ A as a weight has them, fp32. The scale follows the product, in PEFT's
        order, so that whole matrices have the bits of its merge."""
        a, b = (self._matrix(name) for name in (pair.a, pair.b))
        if pair.transposed:
            return (b @ a[:, first:last]).T
        return b[first:last] @ a

    def _matrix(self, name: str) -> torch.Tensor:
        shape = self._adapters.shape(name)
        return self._adapters.read(name, 0, math.prod(shape)).float().view(shape)

    def _check_shapes(self) -> None:
        for name, pair in self._pairs.items():
            a, b = self._adapters.shape(pair.a), self._adapters.shape(pair.b)
            wanted = (b[0], a[-1])[:: -1 if pair.transposed else 1]
            if len(a) != 2 or len(b) != 2 or a[0] != b[1] or self.shape(name) != wanted:
                raise CheckpointError(f"adapter: expected A and B of {name}, {self.shape(name)}, found {a} and {b}")
        for name, stored in self._replaced.items():
            if self._adapters.shape(stored) != self.shape(name):
                raise CheckpointError(
                    f"adapter: expected {self.shape(name)} of {name}, as in the base, found "
                    f"{self._adapters.shape(stored)} (a vocabulary of another size?); {_MERGE}"
                )


def _parts(adapters: TensorSource, model: nn.Module) -> tuple[dict[str, _Pair], dict[str, str]]:
    """By the name of the weight that they change: A and B, and tensors that replace it."""
    found: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for name in adapters.names():
        path, lora, part = name.removeprefix(PREFIX).partition(".lora_")
        if lora:
            part = part.removeprefix("embedding_").removesuffix(".weight")
            found.setdefault(path, {})[part] = name
        else:
            replaced[path.replace(".base_layer.", ".")] = name
    if odd := [f"{path}.lora_{part}" for path, parts in found.items() for part in parts if part not in ("A", "B")]:
        raise CheckpointError(f"adapter: expected A and B of each layer, found also {some(odd)}; {_MERGE}")
    return {
        f"{path}.weight": _Pair(parts["A"], parts["B"], _is_transposed(path, model)) for path, parts in found.items()
    }, replaced


def _scale(settings: Mapping[str, Any], name: str, rows: int) -> float:
    """The factor of the product of a weight's A, which has this many rows, and B. CheckpointError if it should have
    others."""
    path = name.removesuffix(".weight")

    def of(patterns: str, default: str) -> Any:
        """The value of the first pattern that matches the end of the layer's path, as in PEFT's get_pattern_key."""
        own = (settings.get(patterns) or {}).items()
        return next((value for key, value in own if re.match(rf"(.*\.)?({key})$", path)), settings[default])

    if rows != (rank := of("rank_pattern", "r")):
        raise CheckpointError(f"adapter: expected rank {rank} of {path} by {CONFIG}, found {rows}; save it again")
    return float(of("alpha_pattern", "lora_alpha")) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _is_transposed(path: str, model: nn.Module) -> bool:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False  # a layer that the model lacks: reported by its name
    if type(module) is nn.Linear:
        return False
    if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D":
        return True
    raise CheckpointError(
        f"adapter: expected adapters of linear layers and embeddings, found one of {path}, {type(module).__name__}; "
        f"{_MERGE}"
    )


class AdapterFolder(WeightsFolder):
    """The tensors of a folder that PEFT wrote, and its settings: a TensorSource.

    CheckpointError if its weights are missing or damaged.
    """

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        return found

    def _read_places(self) -> Iterable[tuple[str, str]]:
        self._files[WEIGHTS] = TensorFile(self.path / WEIGHTS)
        return dict.fromkeys(self._files[WEIGHTS].keys(), WEIGHTS).items()


def added(base: TensorSource, adapters: AdapterFolder, model: nn.Module) -> MergedLora:
    """`base` with the adapters of a folder, for a model that has none. CheckpointError if the model would need two
    weights in place of a tied one, or is to get adapters of its own."""
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise CheckpointError(
            f"{adapters.path}: expected adapters for a model that gets none of its own, found adapter=lora; use "
            "adapter=none, or merge these first: export-weights --merge"
        )
    merged = MergedLora(base, adapters, model, adapters.settings)
    if merged.untied:
        raise CheckpointError(
            f"{adapters.path}: expected adapters that leave tied weights equal, found one of an embedding or a head "
            "that are one weight; merge it to a whole model: export-weights --merge"
        )
    return merged
