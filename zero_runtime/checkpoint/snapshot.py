"""What one rank saves: its slices of every state, each element of the model by one rank alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_runtime.checkpoint.layout import KEY, ParameterEntry
from zero_runtime.checkpoint.rng import rng_state
from zero_runtime.checkpoint.source import MASTER
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.unit import Unit

SAFETENSORS_NAME = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of one state of one parameter, flattened; values [stop - start] on the CPU."""

    key: str
    start: int
    stop: int
    values: torch.Tensor


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint, as it was at one step. `shared` is the same on all ranks."""

    slices: list[Slice]
    own: dict[str, Any]  # rng and optimizer counters of this rank
    shared: dict[str, Any]  # parameters, tied, optimizer, loss scaler


def take_snapshot(runtime: ZeroRuntime, *, copy: bool) -> Snapshot:
    """With `copy` the values are the snapshot's own and training may go on; without, views where they lie on a CPU."""
    slices = [one for unit in runtime.units for one in _slices_of(runtime, unit, copy=copy)]
    own = {"rng": rng_state(runtime.device), "counters": runtime.optimizer.counters()}
    scaler = runtime.scaler
    shared = {
        "parameters": {name: entry for unit in runtime.units for name, entry in _entries_of(runtime, unit)},
        "tied": _tied(runtime),
        "optimizer": {"name": runtime.optimizer.config.name, "states": list(runtime.optimizer.state_names)},
        "loss_scaler": {
            "scale": scaler.scale,
            "hysteresis_left": scaler.hysteresis_left,
            "steps": scaler.steps,
            "last_overflow": scaler.last_overflow,
        },
    }
    return Snapshot(slices, own, shared)


def states_of(runtime: ZeroRuntime, unit: Unit) -> dict[str, torch.Tensor]:
    """The unit's [S] shards by state; of a frozen one its parameters alone, as they are."""
    master = unit.param_shard if unit.master_shard is None else unit.master_shard
    return {MASTER: master, **runtime.optimizer.states_of(unit)}


def _slices_of(runtime: ZeroRuntime, unit: Unit, *, copy: bool) -> list[Slice]:
    """Replicas of a shard each save their own part of it, so that nothing is written twice in any row."""
    collectives = runtime.collectives
    parts = replace(unit.layout, shard_count=collectives.world)  # P is a multiple of the world
    part = collectives.shard_rank * collectives.replica_count + collectives.replica_rank
    offset = collectives.replica_rank * parts.shard_numel
    found = []
    for state, shard in states_of(runtime, unit).items():
        for piece in parts.pieces(part):
            values = shard.detach()[offset + piece.shard_offset :][: piece.stop - piece.start]
            values = values.to("cpu", copy=copy)
            found.append(Slice(KEY.format(state=state, name=piece.name), piece.start, piece.stop, values))
    return found


def _entries_of(runtime: ZeroRuntime, unit: Unit) -> list[tuple[str, ParameterEntry]]:
    dtypes = {state: SAFETENSORS_NAME[shard.dtype] for state, shard in states_of(runtime, unit).items()}
    return [(segment.name, ParameterEntry(segment.shape, unit.trainable, dtypes)) for segment in unit.layout.segments]


def _tied(runtime: ZeroRuntime) -> dict[str, str]:
    """Every other name of a parameter, to the name that its unit knows it by."""
    owners = {
        id(param): segment.name
        for unit in runtime.units
        for param, segment in zip(unit.params, unit.layout.segments, strict=True)
    }
    names = runtime.model.named_parameters(remove_duplicate=False)
    return {name: owners[id(param)] for name, param in names if name != owners[id(param)]}
