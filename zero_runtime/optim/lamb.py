"""LAMB: each parameter's update is scaled by the ratio of the norms of its weights and of its update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.kernels import ops
from zero_runtime.kernels.reference import trust_ratios
from zero_runtime.kernels.settings import Lamb
from zero_runtime.optim.configs import LambConfig
from zero_runtime.optim.groups import Run
from zero_runtime.optim.rules import Held, StepNumbers, UpdateRule, adam_settings, part_of, pieces_of
from zero_runtime.unit import Unit


class LambRule(UpdateRule):
    """Sums the squares of all parameters over the ranks in one message, then updates all parameters.

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


def lamb_settings(config: LambConfig, run: Run, numbers: StepNumbers) -> Lamb:
    settings: Lamb = adam_settings(Lamb, config, run, numbers)
    if config.correction == "none":
        return replace(settings, corrects_bias=False)
    return settings.with_corrected_rate if config.correction == "rate" else settings


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
