"""Looking at and changing full tensors: parameters, gradients and optimizer states, gathered from the shards.

These functions are methods of ZeroRuntime. All of them are collectives that every rank must call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.errors import CallOrderError, PlanError
from zero_runtime.optim.loss_scaler import LossScaler
from zero_runtime.optim.sharded import ShardedOptimizer
from zero_runtime.state_tier import StateTier, residence
from zero_runtime.unit import Unit


class ShardOwner(Protocol):
    """The attributes of a runtime from which full tensors are gathered."""

    units: list[Unit]
    optimizer: ShardedOptimizer
    collectives: Collectives
    tier: StateTier
    scaler: LossScaler

    def renew(self) -> None: ...


@contextmanager
def full_params(
    runtime: ShardOwner, names: Sequence[str] | None = None, *, write: bool = False, source: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Copies of the full parameters by name, in the master's dtype. Every rank must enter the context.

    names: the parameters to gather; None means all. With `write`, the parameters on every rank are replaced at exit by
    the values in the dictionary of rank `source`.
    """
    wanted = _units_of(runtime, names)
    values: dict[str, torch.Tensor] = {}
    for unit, chosen in wanted:
        with residence(runtime.tier, unit):
            whole = unit.full_of(unit.weights_shard)
        values |= {name: whole[name].clone() for name in chosen}
    yield values
    if not write:
        return
    for unit, chosen in wanted:
        for name in chosen:
            runtime.collectives.broadcast(values[name], source=source)
        with residence(runtime.tier, unit, writes=True):
            unit.set_values({name: values[name] for name in chosen})
    runtime.renew()


def full_grad(runtime: ShardOwner, name: str) -> torch.Tensor:
    """The full gradient of one parameter, summed over the ranks and unscaled.

    Every rank must call it between the step's last backward and `step`. The result is a copy in the dtype in which the
    gradient is stored.
    """
    ((unit, _),) = _units_of(runtime, [name])
    unit.settle()
    if unit.grad_shard is None:
        raise CallOrderError(
            f"full_grad({name!r}): expected to be called after the step's last backward and before step(), on a "
            "parameter that is trained"
        )
    return unit.full_of(unit.grad_shard)[name].clone() / runtime.scaler.scale


def full_optimizer_state(runtime: ShardOwner, name: str) -> dict[str, torch.Tensor]:
    """Copies of the full optimizer states of one parameter by name (exp_avg, ...). Every rank must call it."""
    ((unit, _),) = _units_of(runtime, [name])
    with residence(runtime.tier, unit):
        states = {
            state: shard if isinstance(shard, torch.Tensor) else shard.values()
            for state, shard in runtime.optimizer.told_states_of(unit).items()
        }
        return {state: unit.full_of(values)[name].clone() for state, values in states.items()}


def _units_of(runtime: ShardOwner, names: Sequence[str] | None) -> list[tuple[Unit, list[str]]]:
    owned = [(unit, unit.names) for unit in runtime.units]
    if names is None:
        return owned
    unknown = set(names) - {name for _, own in owned for name in own}
    if unknown:
        raise PlanError(
            f"no parameter named {sorted(unknown)}; a tied parameter goes by its first name in model.named_parameters()"
        )
    chosen = [(unit, [name for name in own if name in names]) for unit, own in owned]
    return [(unit, own) for unit, own in chosen if own]
