"""Which layers of a model are divided, and how: from a plan of transformers, from the structure, or from patterns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.parallel.tensor.adapters import BASE, base_of, parts_of, refuse_undivided, unwrapped
from zero_runtime.unit_planner import block_modules


class Kind(Enum):
    """How a layer is divided.

    COLUMN: a linear layer by its outputs. GATHERED: a column layer whose outputs are gathered on every rank. ROW: a
    linear layer by its inputs, which sums over the ranks. VOCABULARY: an embedding by its rows. HEAD: a linear layer
    that returns logits, by its outputs. HEADS: an embedding with one column for each attention head, by its columns.
    SUMMED: replicated, but used by divided computations. REPLICATED: not divided. SHARED_INPUT, SLICED: A and B of an
    adapter of a column layer; the first is summed and reads the input of the column layers, the second is divided by
    its outputs and reads what the first computes.
    """

    COLUMN = "column"
    GATHERED = "gathered"
    ROW = "row"
    VOCABULARY = "vocabulary"
    HEAD = "head"
    HEADS = "heads"
    SUMMED = "summed"
    REPLICATED = "replicated"
    SHARED_INPUT = "shared input"
    SLICED = "sliced"


# Styles of transformers' tensor-parallel plans.
_STYLES = {
    "colwise": Kind.COLUMN,
    "rowwise": Kind.ROW,
    "colwise_gather_output": Kind.HEAD,
    "colwise_rep": Kind.HEAD,
    "embedding_rowwise": Kind.VOCABULARY,
    "vocab_parallel": Kind.VOCABULARY,
    "replicated_with_grad_allreduce": Kind.SUMMED,
}
_USER_KINDS = (Kind.COLUMN, Kind.ROW, Kind.GATHERED, Kind.SUMMED, Kind.REPLICATED)
_WHOLE = (Kind.SUMMED, Kind.REPLICATED)
HEAD_SIZES = ("head_dim", "head_size", "key_value_proj_dim")  # attributes of attention modules


@dataclass(frozen=True)
class Division:
    """One divided layer. parts: number of equal matrices that are fused one after another in its outputs."""

    kind: Kind
    parts: int = 1


def divisions_of(model: nn.Module, patterns: tuple[str, ...] = ()) -> dict[str, Division]:
    """The divided layers of a model by path.

    patterns: `PATH=KIND` with the wildcards of file names; KIND is column, row, gathered, summed, replicated, or
    `column:N` for a layer of N fused matrices. They replace what the plan or the structure says about the layers that
    they match. PlanError if the model has no plan and its structure is not known.
    """
    modules = dict(model.named_modules())
    found = _of_plan(model, modules)
    if not found:
        found = _of_structure(model, modules, patterns)
    found |= _of_vocabulary(model, modules)
    for pattern, division in map(_parsed, patterns):
        matched = [path for path, module in modules.items() if fnmatchcase(path, pattern)]
        matched = [path for path in matched if linear_sizes(modules[path]) or division.kind in _WHOLE]
        if not matched:
            raise PlanError(f"parallel.patterns: expected {pattern!r} to match a linear layer, found none; correct it")
        found |= dict.fromkeys(matched, division)
    found = {path: division for path, division in found.items() if division.kind is not Kind.REPLICATED}
    found = dict(_with_adapters(found, modules))
    if not any(division.kind in (Kind.COLUMN, Kind.ROW, Kind.GATHERED) for division in found.values()):
        raise PlanError(
            f"parallel.tp: expected a model with pairs of linear layers in repeated blocks, found none in "
            f"{type(model).__name__}; name them in parallel.patterns, or use parallel.tp=1"
        )
    return found


def _parsed(pattern: str) -> tuple[str, Division]:
    path, equals, word = pattern.rpartition("=")
    kind, _, parts = word.partition(":")
    if (
        not equals
        or kind not in {one.value for one in _USER_KINDS}
        or (parts and (not parts.isdigit() or parts == "0"))
    ):
        raise PlanError(
            "parallel.patterns: expected PATH=column, PATH=column:N, PATH=row, PATH=gathered, PATH=summed or "
            f"PATH=replicated, found {pattern!r}"
        )
    return path, Division(Kind(kind), int(parts or 1))


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of an nn.Linear or of a Conv1D of transformers, also below adapters; None for others."""
    module = base_of(module)
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        inputs, outputs = module.weight.shape  # type: ignore[misc]  # a Conv1D has a matrix
        return int(inputs), int(outputs)
    return None


def _with_adapters(found: Mapping[str, Division], modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Division]]:
    """The divisions with those of adapters: see [Note: divided adapters] in adapters.py."""
    linear = (Kind.COLUMN, Kind.ROW)
    refuse_undivided(modules, {path for path, division in found.items() if division.kind not in linear})
    for path, division in found.items():
        parts = parts_of(modules[path], path)
        if parts is None:
            yield path, division
            continue
        yield f"{path}.{BASE}", division
        first, second = (next(one for one, module in modules.items() if module is part) for part in parts)
        if division.kind is Kind.COLUMN:
            yield first, Division(Kind.SHARED_INPUT)
            yield second, Division(Kind.SLICED, division.parts)
        else:
            yield first, Division(Kind.ROW)


# ---- plans of transformers -------------------------------------------------------------------------------------------


def _of_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Division]:
    """The divisions by `base_model_tp_plan` of the model's configuration; empty without one.

    Its names begin at the base model, which may be the model itself.
    """
    plan: Mapping[str, str] = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    inner = unwrapped(model)
    path_of_inner = next(path for path, module in modules.items() if module is inner)
    prefix = getattr(inner, "base_model_prefix", "")
    base = f"{prefix}." if prefix and hasattr(inner, prefix) else ""
    base = f"{path_of_inner}.{base}" if path_of_inner else base
    found: dict[str, Division] = {}
    for pattern, style in plan.items():
        for path in modules:
            if not fnmatchcase(path, base + pattern):
                continue
            if style not in _STYLES:
                raise PlanError(
                    f"parallel.tp: expected a plan of the styles {', '.join(_STYLES)}, found {style!r} for {path}; "
                    f"say how it is divided in parallel.patterns, or use parallel.tp=1"
                )
            found[path] = Division(_STYLES[style])
    return found


# ---- structure -------------------------------------------------------------------------------------------------------


def _of_structure(model: nn.Module, modules: Mapping[str, nn.Module], patterns: tuple[str, ...]) -> dict[str, Division]:
    """In repeated blocks, the linear layers that one module owns: the last is a row layer, the others are columns.

    This order of registration is the field's: query, key, value, output; gate, up, down.
    """
    blocks = block_modules(model)
    named = tuple(_parsed(pattern)[0] for pattern in patterns)
    inside = {id(module) for block in blocks for module in block.modules()}
    found: dict[str, Division] = {}
    for path, module in modules.items():
        if id(module) not in inside:
            continue
        layers = [(f"{path}.{name}", child) for name, child in module.named_children() if linear_sizes(child)]
        if len(layers) < 2 or any(fnmatchcase(one, pattern) for one, _ in layers for pattern in named):
            continue
        *columns, (row, last) = layers
        for column, layer in columns:
            found[column] = Division(Kind.COLUMN, _fused(module, column, layer, last))
        found[row] = Division(Kind.ROW)
        if head_size(module) is not None:
            found |= dict(_heads_of(module, path, columns[0][1]))
    return found


def _fused(owner: nn.Module, path: str, column: nn.Module, row: nn.Module) -> int:
    """The number of matrices fused in a column layer, from the inputs of the row layer. PlanError if it is unknown."""
    outputs, inputs = (linear_sizes(column) or (0, 0))[1], (linear_sizes(row) or (0, 0))[0]
    if outputs == inputs or (head_size(owner) is not None and inputs % outputs == 0):  # grouped heads have fewer keys
        return 1
    if type(owner).__name__ == "GPT2Attention" and outputs == 3 * inputs:
        return 3
    raise PlanError(
        f"parallel.tp: expected {path} to have {inputs} outputs, as many as its row layer has inputs, found {outputs}: "
        f"it may hold several matrices in an order that is not known. Name the layers of its module in "
        f"parallel.patterns: '{path}=column:N' if N matrices follow one another, '=column' if they alternate by head, "
        f"and the row layer '=row'; or use parallel.tp=1"
    )


def head_size(module: nn.Module) -> int | None:
    """The elements of one attention head, if the module is an attention."""
    return next(
        (int(getattr(module, name)) for name in HEAD_SIZES if isinstance(getattr(module, name, None), int)), None
    )


def _heads_of(owner: nn.Module, path: str, query: nn.Module) -> Iterator[tuple[str, Division]]:
    """Embeddings with one column for each head, such as T5's bias of relative positions."""
    size, outputs = head_size(owner), (linear_sizes(query) or (0, 0))[1]
    for name, child in owner.named_children():
        layer = base_of(child)
        if type(layer) is nn.Embedding and size and layer.embedding_dim * size == outputs:
            yield f"{path}.{name}", Division(Kind.HEADS)


# ---- the vocabulary --------------------------------------------------------------------------------------------------


def _of_vocabulary(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Division]]:
    """The embeddings of tokens and the head, if both are there."""
    pair = _vocabulary_pair(model, modules)
    if pair is None:
        return
    embedding, head = pair
    for path, module in modules.items():
        if module is head:
            yield path, Division(Kind.HEAD)
        elif type(base_of(module)) is nn.Embedding and (module is embedding or module.weight is embedding.weight):
            yield path, Division(Kind.VOCABULARY)


def _vocabulary_pair(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[nn.Embedding, nn.Linear] | None:
    getters: list[Any] = [getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output")]
    if all(map(callable, getters)):
        embedding, head = (getter() for getter in getters)
        if type(base_of(embedding)) is nn.Embedding and type(base_of(head)) is nn.Linear:
            return embedding, head
        return None
    inside = {id(module) for block in block_modules(model) for module in block.modules()}
    outside = [module for module in modules.values() if id(module) not in inside]
    heads = [module for module in outside if isinstance(module, nn.Linear) and type(module) is nn.Linear]
    embeddings = [module for module in outside if isinstance(module, nn.Embedding) and type(module) is nn.Embedding]
    pairs = ((one, head) for head in heads for one in embeddings if one.weight.shape == head.weight.shape)
    return next(pairs, None)
