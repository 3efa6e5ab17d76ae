"""The section tensor_parallel.partition_config: which layers are divided, by expressions over the names of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zero_runtime.deepspeed.schema import BOOL, LIST, WHOLE, Reader, all_idle, choice, idle, mapped, only

if TYPE_CHECKING:
    from torch import nn

WHERE = "tensor_parallel.partition_config"
PARTITION = {
    "layer_specs": mapped(LIST),
    "use_default_specs": mapped(BOOL),
    "strict_mode": only(False, kind=BOOL, reason="layers that no spec names stay whole; name them with type skip"),
    **all_idle(WHOLE, "tp_size", "embedding_partition_dim"),
    "lm_head_patterns": idle(LIST),
}
_SPEC = {
    **{name: mapped(LIST) for name in ("patterns", "shape", "model_types")},
    "partition_type": choice("column", "row", "skip", reason="DeepSpeed has three"),
    "partition_dim": mapped(WHOLE),
    **dict.fromkeys(("gather_output", "grad_allreduce"), mapped(BOOL)),
}
Specs = tuple[Mapping[str, Any], ...]


def read_specs(section: Mapping[str, Any], reader: Reader) -> Specs:
    """The valid layer specs; the others are problems. Each has a key "word", its kind in the runtime's patterns."""
    specs = []
    for number, given in enumerate(section.get("layer_specs", ())):
        where = f"{WHERE}.layer_specs[{number}]"
        found = reader.read(_SPEC, given if isinstance(given, Mapping) else {}, f"{where}.")
        kind, shape = found.get("partition_type", "column"), found.get("shape")
        dim = 1 if kind == "row" else 0
        word = "summed" if found.get("grad_allreduce") else {"skip": "replicated"}.get(kind, kind)
        if found.get("gather_output"):
            word = "gathered"
        if shape is not None:
            fused = len(shape) == 2 and isinstance(shape[0], int) and word == "column"
            word = f"column:{shape[0]}"
            if not fused:
                reader.refuse(f"{where}.shape", f"expected [N, -1] of a column without gather_output, found {shape}")
        if found.get("partition_dim", dim) != dim or not found.get("patterns"):
            reader.refuse(where, f"expected patterns, and {dim} as the partition_dim of a {kind}, found {dict(given)}")
        specs.append({**found, "word": word})
    return tuple(specs)


def patterns_of(model: nn.Module, specs: Specs, *, others_whole: bool) -> Iterator[str]:
    """The runtime's patterns for the layers of a model. The first spec that matches decides.

    others_whole: whether layers without a spec stay whole; else the runtime's own rule divides them.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    specs = tuple(one for one in specs if not one.get("model_types") or kind in one["model_types"])
    for path, module in model.named_modules():
        if "weight" in dict(module.named_parameters(recurse=False)):
            name = f"{path}.weight".removeprefix(".")
            words = [one["word"] for one in specs if any(re.match(pattern, name) for pattern in one["patterns"])]
            if words or others_whole:
                yield f"{path}={(words or ['replicated'])[0]}"
