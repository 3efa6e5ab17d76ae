"""1-bit Adam (arXiv 2102.02888): after a warm-up of Adam, ranks average signs of their momentum instead of gradients.

In the warm-up the gradients are summed and AdamW updates as always. After it the second moment stays as it is, and
gradients are not summed any more. Each rank i of N computes its own momentum m_i = beta1 * m + (1 - beta1) * N * g_i
from the common m and its own gradient g_i, adds what was lost the last time, and sends each rank its part as signs with
one scale, sqrt(sum of squares / elements). The rank that owns a part averages what it receives, adds what it lost the
last time, and sends the average to all as signs with a scale. That is the new m, with the same bits on every rank. Each
of the two messages has P/N elements of one bit and a scale for each pair of ranks. The bias corrections are Adam's;
that of the second moment stays with it.

Every rank keeps its lost part [P] and that of its average [P/N] in fp32, and where states are sharded the full m [P].
They are not in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.kernels import ops
from zero_runtime.kernels.reference import adam_step_, root64
from zero_runtime.kernels.settings import AdamNumbers, AdamW
from zero_runtime.kernels.wire_format import packed_signs_numel, read_signs_, write_signs_
from zero_runtime.optim.configs import OneBitAdamConfig
from zero_runtime.optim.rules import ElementwiseRule, Held, StepNumbers, UpdateRule, adam_settings, part_of
from zero_runtime.unit import Unit


@dataclass
class _Kept:
    """What one unit keeps between steps, all fp32: the full momentum [P], and what was lost of this rank's momentum [P]
    and of the average of its part [P/N]."""

    momentum: torch.Tensor
    lost: torch.Tensor
    lost_average: torch.Tensor


class OneBitRule(UpdateRule):
    """AdamW for the first updates, then sign-compressed momentum."""

    def __init__(self, config: OneBitAdamConfig, helds: Sequence[Held], collectives: Collectives) -> None:
        self._config = config
        self._collectives = collectives
        self._adamw = ElementwiseRule(config)
        self._kept = {_unit(held).name: _kept(_unit(held), collectives) for held in helds}
        self._is_current = False  # the full momenta are those of the states

    def tensors(self) -> list[torch.Tensor]:
        """What is kept besides the states, for counting; a momentum that is the state itself is counted there."""
        alone = self._collectives.shard_count == 1
        kept = self._kept.values()
        return [one for unit in kept for one in (unit.lost, unit.lost_average, *(() if alone else (unit.momentum,)))]

    def resume(self, helds: Sequence[Held], counters: Mapping[str, float]) -> None:
        """Nothing was lost yet, and momenta are gathered again: a checkpoint has the shards of the momentum alone."""
        self._is_current = False
        for kept in self._kept.values():
            kept.lost.zero_()
            kept.lost_average.zero_()

    def free(self) -> None:
        self._kept.clear()

    def update(self, helds: Sequence[Held], numbers: StepNumbers) -> None:
        if not self._config.compresses_in(numbers.step):
            self._adamw.update(helds, numbers)
            return
        for held in helds:
            self._average(held, numbers)
            self._step(held, numbers)
        self._is_current = True

    def _average(self, held: Held, numbers: StepNumbers) -> None:
        """Replace the momentum by the average over the ranks, as it is read back from signs."""
        unit, ranks, exp_avg = _unit(held), self._collectives.world, held.states["exp_avg"]
        kept = self._kept[unit.name]
        assert unit.gradients.unsharded_grad is not None
        if self._collectives.shard_count == 1:
            kept.momentum = exp_avg
        elif not self._is_current:
            self._collectives.all_gather_uncounted(kept.momentum, exp_avg)
        beta1 = self._config.beta1 if numbers.momentum is None else numbers.momentum
        # From here on `lost` is this rank's momentum with what was lost before.
        # Gradients are summed over the ranks, so `ranks` times this rank's own is what the paper averages.
        kept.lost.add_(kept.momentum * beta1)
        kept.lost.add_(unit.gradients.unsharded_grad.to(torch.float32) * (numbers.grad_scale * ((1 - beta1) * ranks)))
        size = packed_signs_numel(unit.layout.padded_numel // ranks)
        sent, received = (torch.empty(size * ranks, dtype=torch.uint8, device=unit.device) for _ in range(2))
        for place, (codes, values) in enumerate(zip(sent.chunk(ranks), kept.lost.chunk(ranks), strict=True)):
            _compress_(codes, values, self._elements(unit, place))
        self._collectives.trade(received, sent, unit.name, kind="sign_all_to_all").wait()
        own = self._collectives.rank
        received.chunk(ranks)[own].copy_(sent.chunk(ranks)[own])
        for codes in received.chunk(ranks):
            kept.lost_average.add_(_read(codes, kept.lost_average) / ranks)
        part = torch.empty(size, dtype=torch.uint8, device=unit.device)
        _compress_(part, kept.lost_average, self._elements(unit, own))
        self._gather(received, part, unit.name)
        for codes, values in zip(received.chunk(ranks), kept.momentum.chunk(ranks), strict=True):
            read_signs_(values, codes)
        self._clear_padding(unit, kept)
        if kept.momentum is not exp_avg:
            exp_avg.copy_(unit.layout.shard_of(kept.momentum, self._collectives.shard_rank))

    def _gather(self, full: torch.Tensor, part: torch.Tensor, unit: str) -> None:
        """Fill `full` from the part of every rank."""
        group, ranks = self._collectives.widest
        if ranks == 1:
            full.copy_(part)
            return
        kind = "sign_all_gather"
        self._collectives.ledger.record(kind, unit, (ranks - 1) * part.numel(), part.dtype)
        self._collectives.issue(kind, unit, full, self._collectives.all_gather_over(full, part, group))()

    def _elements(self, unit: Unit, place: int) -> int:
        """Elements of a part of the unit without padding."""
        size = unit.layout.padded_numel // self._collectives.world
        low, high = place * size, (place + 1) * size
        return size - sum(max(min(stop, high) - max(start, low), 0) for start, stop in unit.layout.gaps)

    def _clear_padding(self, unit: Unit, kept: _Kept) -> None:
        """A sign has no zero, so padding would become a number."""
        size, rank = kept.lost_average.numel(), self._collectives.rank
        for start, stop in unit.layout.gaps:
            kept.momentum[start:stop].zero_()
            kept.lost[start:stop].zero_()
            kept.lost_average[max(start - rank * size, 0) : max(stop - rank * size, 0)].zero_()

    def _step(self, held: Held, numbers: StepNumbers) -> None:
        """AdamW's update with the second moment and its correction as the warm-up left them."""
        left = replace(numbers, step=self._config.warmup_updates)
        for run in held.runs:
            part = part_of(held, run.start, run.stop)
            now, then = (adam_settings(AdamW, self._config, run, one).numbers for one in (numbers, left))
            exp_avg, exp_avg_sq = part.states
            settled = AdamNumbers(*now)._replace(correction=then.correction)
            adam_step_(part.master, exp_avg, exp_avg_sq, settled, part.param_out)


def _compress_(packed: torch.Tensor, values: torch.Tensor, elements: int) -> None:
    """Write the signs and the scale of values [n] and leave in `values` what they lose."""
    squares = ops.sum_of_squares(values)
    write_signs_(packed, values, root64(squares / max(elements, 1)).to(torch.float32))
    values.sub_(_read(packed, values))


def _read(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(like)
    read_signs_(found, packed)
    return found


def _unit(held: Held) -> Unit:
    assert isinstance(held.unit, Unit), "offload refuses 1-bit Adam"
    return held.unit


def _kept(unit: Unit, collectives: Collectives) -> _Kept:
    padded = unit.layout.padded_numel
    momentum, lost = (torch.zeros(padded, dtype=torch.float32, device=unit.device) for _ in range(2))
    average = torch.zeros(padded // collectives.world, dtype=torch.float32, device=unit.device)
    return _Kept(average[:0] if collectives.shard_count == 1 else momentum, lost, average)
