"""The keys that a configuration had first, by which points keep their ids while keys come and go.

Both tables are closed: no key joins them, and none leaves. A key that is in neither is part of a point's id only where
it differs from its default, so that an earlier point, which did not have the key, keeps its id. Hence the default of a
new key is what earlier points were measured with, and stays so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any

from orchestrator.config.parts import class_of, default_kind, hints_of, parts_of, unset
from zero_runtime.limits import keys_of

# Part of every id; a key that the schema no longer has counts with the value given here, by which it did nothing.
FIRST: Mapping[str, Any] = {
    "seed": 1234,
    "zero": {"stage": 2, "prefetch": 1, "shard_ranks": None, "reduce_at_boundary": False, "unit_numel": None},
    "precision": {
        **{"param": "bf16", "reduce": "fp32", "accumulate": "fp32", "master": "fp32", "compute": "auto", "tf32": False},
        **{"loss_scale": None, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2},
        **{"consecutive_hysteresis": False, "min_loss_scale": 1.0, "keep_dtype": []},
    },
    "offload": {
        **{"params": "device", "optimizer": "device", "ratio": 1.0, "step": "after_backward", "folder": None},
        **{"block_mib": 4, "requests": 4, "ahead": 1, "verify": True},
    },
    "batch": {"micro": 4, "accumulation": None, "global_size": None, "seq": 128},
    "model": {"name": None, "model_type": None, "config": {}, "path": None},
    "adapter": {"kind": "none", "rank": 8, "alpha": 16.0, "targets": []},
    "data": {"kind": "stdlib", "path": None, "tokenizer": "auto", "validation_fraction": 0.05},
    "optimizer": {
        **{"kind": "adamw", "lr": 0.003, "clip_norm": 1.0, "name": None, "arguments": {}},
        **dict.fromkeys(("beta1", "beta2", "eps", "weight_decay", "no_decay", "momentum", "dampening", "nesterov")),
    },
    "scheduler": {
        **{"kind": "cosine", "warmup_steps": 5, "min_lr_ratio": 0.1},
        **dict.fromkeys(("warmup_type", "start_lr_ratio", "rise_steps", "fall_steps", "decay_steps", "decay_rate")),
        **dict.fromkeys(("momentum_min", "momentum_max", "interval_steps", "interval_rate", "staircase")),
    },
    "recompute": {"kind": "none", "every": 2, "offload": "none"},
    "loss": {"kind": "full", "tile": 1024},
    "checkpoint": {"kind": "none", "every": None, "background": True, "weights": "none"},
    "resources": {"device": "auto", "ranks": None, "nodes": 1, "threads": None},
    "measure": {"warmup_steps": 5, "steps": 25, "validation_batches": 2},
}
# Part of the id unless they have the value given here, which is no default: of optimizers that came after the first.
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {
        "state_dtype": "fp32",
        **dict.fromkeys(("ns_steps", "ns_dtype", "lr_scaling", "matrices", "adamw_lr_ratio", "warmup_updates")),
    }
}


def counted(group: str, cls: type | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group that are part of an id. `cls`: the group's class, None for one that the schema lacks."""
    first = FIRST.get(group, {})
    kind = str(values.get("kind", ""))
    left_out = {**({} if cls is None else defaults(cls, kind)), **LEFT_OUT.get(group, {})}
    kept = {key: value for key, value in values.items() if key in first or value != left_out.get(key)}
    return {**kept, **{key: value for key, value in first.items() if key not in values}}


def without_gone(group: str, cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """A group as an earlier version recorded it, without the keys that have left the schema and did nothing there."""
    known, first = hints_of(cls), FIRST.get(group, {})
    return {key: value for key, value in values.items() if key in known or value != first.get(key)}


@cache  # called for each group of every point of a sweep
def defaults(cls: type, kind: str = "") -> Mapping[str, Any]:
    """The default of each key of a group of this kind; of a key that the kind lacks, the value that says so."""
    found = {key: unset(hint) for key, hint in hints_of(cls).items()}
    for name, one in parts_of(cls).items():
        made = one.default if kind == default_kind(cls) or not one.metadata["part"] else None
        for key, inner in keys_of(class_of(cls, name, kind)).items():
            found[key] = default_of(inner) if made is None else getattr(made, inner.name)
    return found | {one.name: default_of(one) for one in fields(cls) if "part" not in one.metadata}


def default_of(one: Field[Any]) -> Any:
    """The default of a field; MISSING if it has none."""
    return one.default if one.default_factory is MISSING else one.default_factory()
