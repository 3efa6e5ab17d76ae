"""Update rules of the optimizers: which operation of `kernels` runs on which part of a shard, with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.errors import PlanError
from zero_runtime.kernels import ops
from zero_runtime.kernels.reference import trust_ratios
from zero_runtime.kernels.settings import Adam, AdamW, Lamb, Lion, Sgd
from zero_runtime.offload.tier import Shards
from zero_runtime.optim.configs import (
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    OneBitAdamConfig,
    OptimizerConfig,
    SgdConfig,
)
from zero_runtime.optim.groups import GroupSettings, Run
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


class ElementwiseRule:
    """AdamW (also in 8 bits), Adam, SGD and Lion: updates each run of each unit separately."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._update = UPDATES[type(config)]

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


def lamb_settings(config: LambConfig, run: Run, numbers: StepNumbers) -> Lamb:
    settings: Lamb = adam_settings(Lamb, config, run, numbers)
    if config.correction == "none":
        return replace(settings, corrects_bias=False)
    return settings.with_corrected_rate if config.correction == "rate" else settings


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


UPDATES: dict[type, Callable[..., None]] = {
    AdamWConfig: _adam,
    AdamConfig: _adam,
    AdamW8bitConfig: _adamw8bit,
    OneBitAdamConfig: _adam,
    SgdConfig: _sgd,
    LionConfig: _lion,
}


class LambRule:
    """LAMB: sums the squares of all parameters over the ranks in one message, then updates all parameters.

    Each unit is divided into as many equal parts as there are ranks, and rank r squares only the elements in part r,
    even if it holds more; see [Note: each element once] in grad_norm.py. So a parameter that is split over several
    ranks has one ratio, with the same bits in every row of the plan's table.
    """

    def __init__(self, config: LambConfig, helds: Sequence[Held], collectives: Collectives) -> None:
        self._config = config
        self._collectives = collectives
        # Every rank must number the parameters in the same way, including those of which it holds nothing.
        names = [segment.name for held in helds for segment in held.unit.layout.segments]
        self._place = {name: place for place, name in enumerate(names)}

    def update(self, helds: Sequence[Held], numbers: StepNumbers) -> None:
        if not self._place:
            return
        for held in helds:
            for run in held.runs:
                part = part_of(held, run.start, run.stop)
                settings = lamb_settings(self._config, run, numbers)
                exp_avg, exp_avg_sq = part.states
                ops.lamb_moments_(part.grad, exp_avg, exp_avg_sq, numbers.grad_scale, settings)
        ratios = trust_ratios(self._squares(helds, numbers), self._config.min_coeff, self._config.max_coeff)
        for held in helds:
            for name, start, stop, run in pieces_of(held, self._collectives.shard_rank):
                part = part_of(held, start, stop)
                settings = lamb_settings(self._config, run, numbers)
                exp_avg, exp_avg_sq = part.states
                ops.lamb_(part.master, exp_avg, exp_avg_sq, ratios[self._place[name]], settings, part.param_out)

    def _squares(self, helds: Sequence[Held], numbers: StepNumbers) -> torch.Tensor:
        """[parameters, 2] fp64, summed over the ranks."""
        squares = torch.zeros(len(self._place), 2, dtype=torch.float64, device=numbers.grad_scale.device)
        for held in helds:
            for name, start, stop, run in squared_pieces_of(held, self._collectives):
                part = part_of(held, start, stop)
                settings = lamb_settings(self._config, run, numbers)
                exp_avg, exp_avg_sq = part.states
                squares[self._place[name]] = ops.lamb_squares(part.master, exp_avg, exp_avg_sq, settings)
        return self._collectives.sum_over_ranks_(squares)


def pieces_of(held: Held, shard: int) -> Iterator[tuple[str, int, int, Run]]:
    """Each parameter with elements in the shard: its name, its elements [start, stop) of the shard, its run."""
    for piece in held.unit.layout.pieces(shard):
        start, stop = piece.shard_offset, piece.shard_offset + piece.stop - piece.start
        yield piece.name, start, stop, next(run for run in held.runs if run.start <= start and stop <= run.stop)


def squared_pieces_of(held: Held, collectives: Collectives) -> Iterator[tuple[str, int, int, Run]]:
    """The same for the elements that this rank squares: replicas of a shard square different parts of it, and replicas
    of a tensor-parallel group count once."""
    assert isinstance(held.unit, Unit), "the units of LAMB are not offloaded"
    part_numel = held.unit.layout.shard_numel // collectives.replica_count
    low = collectives.replica_rank * part_numel
    for name, start, stop, run in pieces_of(held, collectives.shard_rank):
        start, stop = max(start, low), min(stop, low + part_numel)
        if start < stop and held.unit.slices.counts_here(name):
            yield name, start, stop, run


def check_momentum(config: OptimizerConfig, momentum: float | None) -> None:
    """Raise PlanError for a momentum outside [0, 1), or if a schedule cycles that of an optimizer that has none."""
    if momentum is not None and not 0 <= momentum < 1:
        raise PlanError(f"momentum: expected it from 0 to below 1, found {momentum}; nothing was updated")
    if momentum is not None and not config.has_momentum:
        raise PlanError(
            f"the schedule cycles the momentum (now {momentum}) and {config.name} has none; give the optimizer a "
            "momentum above 0, or the schedule cycle_momentum=False"
        )
