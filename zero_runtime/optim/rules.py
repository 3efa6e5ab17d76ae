"""Update rules of the optimizers: which operation of `kernels` runs on which part of a shard, with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_runtime.errors import PlanError
from zero_runtime.kernels import ops
from zero_runtime.kernels.settings import Adam, AdamW, Lion, Sgd
from zero_runtime.optim.configs import (
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
)
from zero_runtime.optim.groups import GroupSettings, Run
from zero_runtime.state_tier import Shards
from zero_runtime.unit import Unit


@dataclass(frozen=True)
class Held:
    """One trainable unit's part in the optimizer on this rank: its runs, and its held states by name.

    unit: the unit itself, or the shards that a tier lends for one update.
    """

    unit: Unit | Shards
    runs: tuple[Run, ...]
    states: dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepNumbers:
    """Values of one step: its number from 1, the rate of a run, the cycled momentum, the factor of the gradients."""

    step: int
    rate: Callable[[GroupSettings], float]
    momentum: float | None
    grad_scale: torch.Tensor  # 0-dim fp32, on the device


@dataclass(frozen=True)
class ShardSlice:
    """Elements [start, stop) of a unit's shards."""

    master: torch.Tensor  # [n] master_dtype
    grad: torch.Tensor  # [n] grad_dtype
    states: tuple[torch.Tensor, ...]  # the parts of the held states for these elements, in their order
    param_out: torch.Tensor | None  # [n] param_dtype, if it is a separate tensor


def part_of(held: Held, start: int, stop: int) -> ShardSlice:
    unit = held.unit
    master, grad, param = unit.master_shard, unit.grad_shard, unit.param_shard
    assert master is not None
    assert grad is not None
    states = []
    for state in held.states.values():
        per = unit.layout.shard_numel // state.numel()  # `start` is a multiple of it, see FlatLayout.build
        states.append(state[start // per : -(-stop // per)])
    param_out = None if master is param else param[start:stop]
    return ShardSlice(master[start:stop], grad[start:stop], tuple(states), param_out)


class UpdateRule:
    """Updates master shards and states in place from each unit's grad_shard, and rounds them into param_shard.

    A rule that keeps nothing itself has only `update`. wings.py lists the rules that are not element-wise.
    """

    def update(self, helds: Sequence[Held], numbers: StepNumbers) -> None:
        raise NotImplementedError

    def counters(self, helds: Sequence[Held]) -> dict[str, float]:
        """Scalars that the rule keeps in addition to the states."""
        return {}

    def resume(self, helds: Sequence[Held], counters: Mapping[str, float]) -> None:
        """The states and the number of updates (`counters`) have changed from outside."""

    def tensors(self) -> list[torch.Tensor]:
        """What the rule keeps besides the states, for counting."""
        return []

    def free(self) -> None:
        """Release what the rule keeps."""


class ElementwiseRule(UpdateRule):
    """AdamW (also in 8 bits), Adam, SGD and Lion: updates each run of each unit separately."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._update = update_of(config)

    def update(self, helds: Sequence[Held], numbers: StepNumbers) -> None:
        for held in helds:
            for run in held.runs:
                self._update(self._config, part_of(held, run.start, run.stop), run, numbers)


def _adam(config: Any, part: ShardSlice, run: Run, numbers: StepNumbers) -> None:
    exp_avg, exp_avg_sq = part.states
    settings = adam_settings(Adam if type(config) is AdamConfig else AdamW, config, run, numbers)
    ops.adamw_(part.master, part.grad, exp_avg, exp_avg_sq, numbers.grad_scale, settings, part.param_out)


def _adamw8bit(config: AdamW8bitConfig, part: ShardSlice, run: Run, numbers: StepNumbers) -> None:
    settings = adam_settings(AdamW, config, run, numbers)
    first, first_scale, second, second_scale = part.states
    states = (first, first_scale, second, second_scale)
    ops.adamw8bit_(part.master, part.grad, *states, numbers.grad_scale, settings, part.param_out)


def adam_settings(kind: type, config: AdamWConfig, run: Run, numbers: StepNumbers) -> Any:
    return kind(
        lr=numbers.rate(run.settings),
        beta1=config.beta1 if numbers.momentum is None else numbers.momentum,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=run.settings.weight_decay,
        step=numbers.step,
        corrects_bias=config.corrects_bias,
    )


def _sgd(config: SgdConfig, part: ShardSlice, run: Run, numbers: StepNumbers) -> None:
    settings = Sgd(
        lr=numbers.rate(run.settings),
        momentum=config.momentum if numbers.momentum is None else numbers.momentum,
        dampening=config.dampening,
        weight_decay=run.settings.weight_decay,
        nesterov=config.nesterov,
        step=numbers.step,
    )
    momentum_buffer = part.states[0] if part.states else None
    ops.sgd_(part.master, part.grad, momentum_buffer, numbers.grad_scale, settings, part.param_out)


def _lion(config: LionConfig, part: ShardSlice, run: Run, numbers: StepNumbers) -> None:
    settings = Lion(
        lr=numbers.rate(run.settings),
        beta1=config.beta1 if numbers.momentum is None else numbers.momentum,
        beta2=config.beta2,
        weight_decay=run.settings.weight_decay,
    )
    ops.lion_(part.master, part.grad, part.states[0], numbers.grad_scale, settings, part.param_out)


_UPDATES: dict[type, Callable[..., None]] = {
    AdamWConfig: _adam,
    AdamConfig: _adam,
    AdamW8bitConfig: _adamw8bit,
    SgdConfig: _sgd,
    LionConfig: _lion,
}


def update_of(config: OptimizerConfig) -> Callable[..., None]:
    """The element-wise update of an optimizer, or of the one that it is a form of."""
    return next(_UPDATES[kind] for kind in type(config).__mro__ if kind in _UPDATES)


def pieces_of(held: Held, shard: int) -> Iterator[tuple[str, int, int, Run]]:
    """Each parameter with elements in the shard: its name, its elements [start, stop) of the shard, its run."""
    for piece in held.unit.layout.pieces(shard):
        start, stop = piece.shard_offset, piece.shard_offset + piece.stop - piece.start
        yield piece.name, start, stop, next(run for run in held.runs if run.start <= start and stop <= run.stop)


def check_momentum(config: OptimizerConfig, momentum: float | None) -> None:
    """Raise PlanError for a momentum outside [0, 1), or if a schedule cycles that of an optimizer that has none."""
    if momentum is not None and not 0 <= momentum < 1:
        raise PlanError(f"momentum: expected it from 0 to below 1, found {momentum}; nothing was updated")
    if momentum is not None and not config.has_momentum:
        raise PlanError(
            f"the schedule cycles the momentum (now {momentum}) and {config.name} has none; give the optimizer a "
            "momentum above 0, or the schedule cycle_momentum=False"
        )
