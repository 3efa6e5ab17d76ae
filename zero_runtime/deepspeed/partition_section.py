"""The section tensor_parallel.partition_config: which layers are divided, by expressions over the names of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from zero_runtime.deepspeed.schema import BOOL, LIST, WHOLE, Reader, all_idle, all_mapped, choice, idle, mapped, only

WHERE = "tensor_parallel.partition_config"
PARTITION = {
    "layer_specs": mapped(LIST),
    "use_default_specs": mapped(BOOL),
    "strict_mode": only(False, kind=BOOL, reason="layers that no spec names stay whole; name them with type skip"),
    **all_idle(WHOLE, "tp_size", "embedding_partition_dim"),
    "lm_head_patterns": idle(LIST),
}
_SPEC = {
    **all_mapped(LIST, "patterns", "shape", "model_types"),
    "partition_type": choice("column", "row", "skip", reason="DeepSpeed has three"),
    "partition_dim": mapped(WHOLE),
    **all_mapped(BOOL, "gather_output", "grad_allreduce"),
}
Specs = tuple[Mapping[str, Any], ...]


def read_specs(section: Mapping[str, Any], reader: Reader) -> Specs:
    """The valid layer specs; the others are problems. Each has a key "word", its kind in the runtime's patterns.

    Without use_default_specs the last one leaves every other layer whole; with it the runtime's own rule divides them.
    """
    specs = []
    for number, given in enumerate(section.get("layer_specs", ())):
        where = f"{WHERE}.layer_specs[{number}]"
        found = reader.read(_SPEC, given, f"{where}.") if isinstance(given, Mapping) else {}
        kind, shape = found.get("partition_type", "column"), found.get("shape", [1, -1])
        word = "summed" if found.get("grad_allreduce") else "replicated" if kind == "skip" else kind
        word = "gathered" if found.get("gather_output") else word
        fused = len(shape) == 2 and isinstance(shape[0], int) and (word == "column" or shape[0] == 1)
        dim = int(kind == "row")
        if not found.get("patterns") or not fused or found.get("partition_dim", dim) != dim:
            reader.refuse(where, f"expected patterns, partition_dim {dim} and shape [N, -1] of columns, found {given}")
        specs.append({**found, "word": f"column:{shape[0]}" if word == "column" else word})
    whole = () if section.get("use_default_specs", True) else ({"patterns": [""], "word": "replicated"},)
    return (*specs, *whole)


def patterns_of(model: Any, specs: Specs) -> Iterator[str]:
    """The runtime's patterns for the layers of a model. The first spec that matches decides."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    for path, module in model.named_modules() if specs else ():
        name = f"{path}.weight".removeprefix(".")
        fits = (one for one in specs if not one.get("model_types") or kind in one["model_types"])
        spec = next((one for one in fits if any(re.match(pattern, name) for pattern in one["patterns"])), None)
        if spec is not None and "weight" in dict(module.named_parameters(recurse=False)):
            yield f"{path}={spec['word']}"
