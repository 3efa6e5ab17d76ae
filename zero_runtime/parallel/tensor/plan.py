"""The plan of a division: the slices of every parameter, and the sizes that the model's own code must see.

It is made from the full model, on the meta device or with values, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.parallel.tensor.adapters import layer_path
from zero_runtime.parallel.tensor.axis import TensorAxis
from zero_runtime.parallel.tensor.slices import Split, TensorSlices
from zero_runtime.parallel.tensor.structure import Division, Kind, divisions_of, head_size, linear_sizes
from zero_runtime.parallel.tensor.tokens import TokenPlan, token_plan

# Attributes of attention modules that count heads or elements of all heads: local in a divided module.
_LOCAL_ATTRIBUTES = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("split_size", "inner_dim", "all_head_size"),
)
_NEAREST = 2  # degrees that an error names


@dataclass(frozen=True)
class Count:
    """A number of equal things in a layer that the degree must divide."""

    number: int
    things: str
    path: str


@dataclass(frozen=True)
class SplitPlan:
    """How a model is divided into `degree` slices.

    divisions: the divided layers by path. splits: by the name of the parameter. attributes: local values of attributes,
    by the path of the module. vocabulary: the number of tokens that embedding and head know; None if they are not
    divided. tokens: where hidden states are divided by tokens; None if they are whole.
    """

    degree: int
    divisions: Mapping[str, Division]
    splits: Mapping[str, Split]
    summed: frozenset[str]
    attributes: Mapping[str, Mapping[str, int]]
    vocabulary: int | None
    tokens: TokenPlan | None = None

    def slices(self, rank: int, axis: TensorAxis | None = None) -> TensorSlices:
        """What this rank of a tensor-parallel group holds. axis: the group, if there are ranks."""
        return TensorSlices(rank, self.degree, self.splits, self.summed, axis)


def plan_split(model: nn.Module, degree: int, patterns: tuple[str, ...] = (), *, trains: bool = True) -> SplitPlan:
    """The plan for `degree` ranks; see `divisions_of` for the patterns, with which hidden states stay whole.

    PlanError if a number of heads or a width does not divide; it names the nearest degrees that divide all of them.
    """
    modules = dict(model.named_modules())
    divisions = divisions_of(model, patterns)
    _check_degree(list(_counts(modules, divisions)), degree)
    names: dict[int, str] = {id(param): name for name, param in model.named_parameters()}
    splits: dict[str, Split] = {}
    summed: set[str] = set()
    for path, division in divisions.items():
        for param, split in _splits_of(modules[path], division, degree):
            name = names[id(param)]
            if split is None:
                summed |= {name} if division.kind in (Kind.SUMMED, Kind.SHARED_INPUT) else set()
            elif splits.setdefault(name, split) != split:
                raise PlanError(
                    f"parallel.tp: {name} is used by two layers that divide it differently, one of them {path}; make "
                    "both equal in parallel.patterns"
                )
    head = next((path for path, division in divisions.items() if division.kind is Kind.HEAD), None)
    vocabulary = None if head is None else modules[head].weight.shape[0]
    tokens = token_plan(model) if trains and not patterns else None
    if tokens is not None:
        summed.update(tokens.summed(model, splits))
    attributes = dict(_attributes(modules, divisions, degree))
    return SplitPlan(degree, divisions, splits, frozenset(summed), attributes, vocabulary, tokens)


def owner_of(path: str) -> str:
    """Path of the module that owns a layer, or the layer of an adapter."""
    return layer_path(path).rpartition(".")[0]


def _splits_of(module: nn.Module, division: Division, degree: int) -> Iterator[tuple[nn.Parameter, Split | None]]:
    """The parameters of a divided layer; None for those that stay replicated."""
    outputs = 0 if type(module) in (nn.Linear, nn.Embedding) else 1  # a Conv1D has [in, out]
    dim = {
        **dict.fromkeys((Kind.COLUMN, Kind.GATHERED), outputs),
        Kind.ROW: 1 - outputs,
        Kind.HEAD: 0,
        Kind.VOCABULARY: 0,
        Kind.HEADS: 1,
        Kind.SLICED: outputs,
    }.get(division.kind)
    for name, param in module.named_parameters(recurse=division.kind is Kind.SUMMED):
        shape = tuple(param.shape)
        if dim is None or (name == "bias" and division.kind is Kind.ROW):
            yield param, None
            continue
        own = 0 if name == "bias" else dim
        parts = (shape[own] // division.parts,) * division.parts
        yield param, Split(shape, own, parts, degree)


def _counts(modules: Mapping[str, nn.Module], divisions: Mapping[str, Division]) -> Iterator[Count]:
    """What the degree must divide: attention heads, grouped heads, and widths between column and row layers."""
    for path, division in divisions.items():
        sizes, owner = linear_sizes(modules[path]), modules[owner_of(path)]
        if division.kind not in (Kind.COLUMN, Kind.ROW):
            continue
        if sizes is None:
            raise PlanError(
                f"parallel.tp: expected {path} to be an nn.Linear, found {type(modules[path]).__name__}; divide the "
                "model before other changes to its layers, or use parallel.tp=1"
            )
        width = sizes[1] // division.parts if division.kind is Kind.COLUMN else sizes[0]
        head = head_size(owner)
        if head is None:
            yield Count(width, "columns" if division.kind is Kind.COLUMN else "inputs", path)
        elif division.kind is Kind.COLUMN and width % (3 * head) == 0 and _alternates(modules, divisions, path):
            yield Count(width // (3 * head), "heads", path)
        else:
            yield Count(width // head, "heads", path)


def _alternates(modules: Mapping[str, nn.Module], divisions: Mapping[str, Division], path: str) -> bool:
    """Whether a column layer is the only one of its attention: query, key and value then alternate by head."""
    owner = owner_of(path)
    columns = [one for one, division in divisions.items() if division.kind is Kind.COLUMN and owner_of(one) == owner]
    return columns == [path] and divisions[path].parts == 1


def _check_degree(counts: list[Count], degree: int) -> None:
    """Raise PlanError unless the degree divides every count; the smallest one that it does not divide is named."""
    wrong = [count for count in counts if count.number % degree]
    if not wrong:
        return
    first = min(wrong, key=lambda count: count.number)
    common = math.gcd(*(count.number for count in counts))
    fits = sorted((one for one in range(1, common + 1) if common % one == 0), key=lambda one: (abs(one - degree), one))
    nearest = " or ".join(f"parallel.tp={one}" for one in sorted(fits[:_NEAREST]))
    raise PlanError(
        f"parallel.tp={degree}: expected a divisor of the {first.number} {first.things} of {first.path}, found "
        f"{degree}; use {nearest}, which fits all layers"
    )


def _attributes(
    modules: Mapping[str, nn.Module], divisions: Mapping[str, Division], degree: int
) -> Iterator[tuple[str, dict[str, int]]]:
    owners = dict.fromkeys(owner_of(path) for path, one in divisions.items() if one.kind is Kind.COLUMN)
    for path in owners:
        if head_size(modules[path]) is None:
            continue
        values = {name: getattr(modules[path], name, None) for name in _LOCAL_ATTRIBUTES}
        local = {name: value // degree for name, value in values.items() if type(value) is int}
        if local:
            yield path, local
