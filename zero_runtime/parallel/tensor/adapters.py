"""LoRA adapters of divided layers, as PEFT registers them: `base_layer`, `lora_A` and `lora_B` in the layer's place.

[Note: divided adapters]
A layer adds B (A x) to its output, with A [r, inputs] and B [outputs, r]. Of a column layer a rank holds the rows of B
that belong to its outputs; A is replicated and its gradient, of which each rank computes a term, is summed over the
group. Of a row layer a rank holds the columns of A that belong to its inputs and the results, of r numbers for each
token, are summed in forward; B is replicated. So the updated weights of a layer, base + B A, are divided as its base.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zero_runtime.errors import PlanError

BASE = "base_layer"
_PARTS = ("lora_A", "lora_B")  # module dictionaries by the name of the adapter
_WITHOUT = "use adapter=none, or parallel.tp=1"


def base_of(module: nn.Module) -> nn.Module:
    """The layer that adapters were added to; the module itself without any."""
    base = getattr(module, BASE, None)
    return base if isinstance(base, nn.Module) else module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that PEFT wrapped; the model itself if it is not wrapped."""
    inner = getattr(model, "get_base_model", None)
    found = inner() if callable(inner) else model
    assert isinstance(found, nn.Module)
    return found


def layer_path(path: str) -> str:
    """The path of the layer that a base layer or a part of an adapter belongs to; any other path as it is."""
    owner, _, last = path.rpartition(".")
    if last == BASE:
        return owner
    layer, _, part = owner.rpartition(".")
    return layer if part in _PARTS else path


def parts_of(module: nn.Module, path: str) -> tuple[nn.Linear, nn.Linear] | None:
    """A and B of a layer with one LoRA adapter; None for a layer without. PlanError for any other adapter."""
    if base_of(module) is module:
        return None
    known = {name: getattr(module, name, None) for name in _PARTS}
    both = [list(part.values()) for part in known.values() if isinstance(part, nn.ModuleDict)]
    linear = [part[0] for part in both if len(part) == 1 and type(part[0]) is nn.Linear]
    own = {id(param) for layer in (base_of(module), *linear) for param in layer.parameters()}
    if len(linear) == len(_PARTS) and all(id(param) in own for param in module.parameters()):
        return linear[0], linear[1]
    raise PlanError(
        f"parallel.tp: expected one LoRA adapter with A and B at {path}, found {type(module).__name__} of "
        f"{type(module).__module__.partition('.')[0]} with other parameters; {_WITHOUT}"
    )


def refuse_undivided(modules: Mapping[str, nn.Module], divided: set[str]) -> None:
    """Raise PlanError for an adapter of a divided layer that is no column or row layer: an embedding or the head.

    divided: paths of such layers.
    """
    for path in divided:
        if base_of(modules[path]) is not modules[path]:
            raise PlanError(
                f"parallel.tp: expected adapters at linear layers of the blocks, found one at {path}; {_WITHOUT}"
            )
