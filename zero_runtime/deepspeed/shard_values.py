"""Reads and writes one parameter's weights, gradient and optimizer states: whole, or this rank's elements of them.

[Note: local elements]
A rank's elements of a parameter are those of its shard of the unit: a range of the flattened parameter, which may be
empty and may be another than DeepSpeed's. Where a state is not sharded, they are all elements. What `read_own` returns
and `write_own` takes is that range, [numel].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

from zero_runtime.checkpoint.layout import MASTER
from zero_runtime.checkpoint.load import fill_state
from zero_runtime.deepspeed.live_engines import OwnedParameter
from zero_runtime.errors import CallOrderError, PlanError
from zero_runtime.flat_layout import Piece
from zero_runtime.optim.sharded import ToldState
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.tensor_source import ReadInto, reads_from
from zero_runtime.unit import Unit

GRAD = "grad"


def is_trained(param: OwnedParameter) -> bool:
    """Whether the parameter has a gradient and optimizer states."""
    return _unit_of(param).trainable


def read_full(param: OwnedParameter, state: str) -> torch.Tensor:
    """A copy of the full weights (MASTER), gradient (GRAD) or state, in the dtype in which it is held. A collective.

    A gradient that waits for its reduction is this rank's own, of its own losses rather than of the mean of all ranks.
    """
    unit = _unit_of(param)
    own = unit.local_grad(param.name) if state == GRAD else None
    if own is not None:
        return own * (param.runtime.collectives.data_world / param.runtime.scaler.scale)
    with _shard(param.runtime, unit, state) as shard:
        full = unit.full_of(_values(shard))[param.name]
        return full / param.runtime.scaler.scale if state == GRAD else full.float().clone()


def read_own(param: OwnedParameter, state: str) -> torch.Tensor:
    """A copy of this rank's elements of them, in fp32."""
    unit = _unit_of(param)
    piece = _piece_of(unit, param.name)
    with _shard(param.runtime, unit, state) as shard:
        own = _values(shard)[:0] if piece is None else piece.of(_values(shard))
        return own.float() / (param.runtime.scaler.scale if state == GRAD else 1.0)


def write_own(param: OwnedParameter, state: str, values: torch.Tensor) -> None:
    """Replace this rank's elements. A collective if it changes weights of which every rank keeps a full copy."""
    piece = _piece_of(_unit_of(param), param.name)
    start, numel = (0, 0) if piece is None else (piece.start, piece.numel)
    if values.numel() != numel:
        raise PlanError(
            f"parameter {param.name!r}: expected this rank's {numel} elements, found {values.numel()}; a rank's "
            "elements are those that safe_get_local_fp32_param returns"
        )
    flat = values.detach().reshape(-1)

    def read_into(_name: str, at: int, target: torch.Tensor) -> None:
        target.copy_(flat[at - start : at - start + target.numel()])

    _write(param, state, read_into)


def write_full(param: OwnedParameter, state: str, values: torch.Tensor) -> None:
    """Replace all elements on every rank by those that rank 0 gives. A collective."""
    runtime, unit = param.runtime, _unit_of(param)
    shape = unit.full_shapes[param.name]
    if values.numel() != prod(shape):
        raise PlanError(f"parameter {param.name!r}: expected values of shape {list(shape)}, found {list(values.shape)}")
    whole = values.detach().to(runtime.device, torch.float32, copy=True).contiguous()
    runtime.collectives.broadcast(whole)
    _write(param, state, reads_from({param.name: whole}))


def _write(param: OwnedParameter, state: str, read_into: ReadInto) -> None:
    runtime, unit = param.runtime, _unit_of(param)
    if not unit.trainable:
        raise PlanError(f"parameter {param.name!r}: expected one that is trained, found a frozen one")
    with torch.no_grad(), _shard(runtime, unit, state, writes=True) as shard:
        if state == MASTER:
            unit.fill_weights([param.name], read_into)
        else:
            scaled = _scaled(read_into, runtime.scaler.scale) if state == GRAD else read_into
            fill_state(unit, shard, [param.name], scaled)
    if state == GRAD:
        unit.gradients.forget_squares()
    if state == MASTER:
        runtime.renew()


@contextmanager
def _shard(runtime: ZeroRuntime, unit: Unit, state: str, *, writes: bool = False) -> Iterator[ToldState]:
    """The shard of one state, in memory inside the context."""
    if state == GRAD:
        unit.settle()
        if unit.grad_shard is None:
            raise CallOrderError(
                f"a gradient of {unit.name}: expected to be asked for after the step's last backward and before step()"
            )
        yield unit.grad_shard
        return
    with runtime.resident(unit, writes=writes):
        shards = {MASTER: unit.weights_shard, **runtime.optimizer.told_states_of(unit)}
        if state not in shards:
            raise PlanError(f"expected one of {', '.join(list(shards)[1:])}, found {state!r}")
        yield shards[state]


def _values(shard: ToldState) -> torch.Tensor:
    return shard if isinstance(shard, torch.Tensor) else shard.values()


def _scaled(read_into: ReadInto, scale: float) -> ReadInto:
    def scaled(name: str, start: int, target: torch.Tensor) -> None:
        read_into(name, start, target)
        target.mul_(scale)

    return scaled


def _unit_of(param: OwnedParameter) -> Unit:
    return next(unit for unit in param.runtime.units if param.name in unit.names)


def _piece_of(unit: Unit, name: str) -> Piece | None:
    if name in unit.slices.splits:
        raise PlanError(f"parameter {name!r}: expected no tensor parallelism, found a slice; use safe_get_full_...")
    return next((piece for piece in unit.parameters.pieces.values() if piece.name == name), None)
