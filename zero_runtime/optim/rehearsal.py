"""Calls the operations of the first step on scratch tensors, so that their kernels are compiled before it.

Triton compiles a kernel once for each combination of the tensors' dtypes, of addresses that are
multiples of 16 bytes or not, of lengths that are multiples of 16 or not, and of its constants. `ops.prepare` compares
one variant of each kernel with the reference. Without a rehearsal a rank would compile the variants of its own shards
in its first step, where the other ranks wait for it. A scratch tensor has few elements and the dtype, alignment and
divisibility of the tensor for which it stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.flat_layout import SHARD_ALIGNMENT_NUMEL
from zero_runtime.kernels import ops
from zero_runtime.kernels.reference import GROUP_NUMEL
from zero_runtime.optim.configs import LambConfig, MuonConfig, OptimizerConfig, TorchConfig
from zero_runtime.optim.groups import GroupSettings, Run
from zero_runtime.optim.lamb import lamb_settings, squared_pieces_of
from zero_runtime.optim.rules import Held, ShardSlice, StepNumbers, pieces_of, update_of
from zero_runtime.unit import Unit

DIVISOR = 16  # Triton distinguishes lengths, and addresses in bytes, that are multiples of it
STEPS = (1, 2)  # the constants of SGD's first step differ from those of the others


class _Span(NamedTuple):
    """`numel` elements from element `offset` of a tensor that begins at a multiple of 16 bytes."""

    offset: int
    numel: int

    @classmethod
    def like(cls, start: int, stop: int, block_numel: int = 1) -> _Span:
        """A short span with the alignment and divisibility of elements [start, stop), counted in blocks too."""
        numel, modulus = stop - start, DIVISOR * block_numel
        return cls(start % modulus, numel if numel < 2 * modulus else modulus + numel % modulus)

    def zeros(self, dtype: torch.dtype, device: torch.device, per: int = 1) -> torch.Tensor:
        """A tensor in this place, with one element per `per` elements."""
        stop = -(-(self.offset + self.numel) // per)
        return torch.zeros(stop, dtype=dtype, device=device)[self.offset // per :]


# Every shard begins at 64 bytes and has a multiple of SHARD_ALIGNMENT_NUMEL elements. With two groups of elements the
# sum of squares launches all its kernels.
_SHARD = _Span(0, math.lcm(SHARD_ALIGNMENT_NUMEL, 2 * GROUP_NUMEL))


class _Part(Enum):
    """Of a shard: a run of equal settings, the piece of one parameter, or the part of it that this rank squares."""

    RUN = "run"
    PIECE = "piece"
    SQUARED = "squared"


class _Variant(NamedTuple):
    """What the variants of an update's kernels depend on."""

    device: torch.device
    master: torch.dtype
    grad: torch.dtype
    out: torch.dtype | None
    span: _Span
    settings: GroupSettings
    part: _Part


def rehearse(config: OptimizerConfig, helds: Sequence[Held], collectives: Collectives) -> None:
    """Call every operation of a step in each variant that these units need. Changes no tensor of theirs, sends nothing.

    An offloaded unit has only its gradients on the device.
    """
    units = [unit for held in helds if isinstance(unit := held.unit, Unit)]
    updated = [(held, unit) for held, unit in zip(helds, units, strict=True) if not unit.parameters.states_offloaded]
    with torch.no_grad():
        for unit in units:
            _rehearse_gradients(unit)
        if isinstance(config, MuonConfig):  # its rule for matrices calls no compiled kernel but the sum of squares
            config, updated = config.adamw, [(held, unit) for held, unit in updated if not unit.matrices]
        for variant in {one for held, unit in updated for one in _variants(config, held, unit, collectives)}:
            for step in STEPS:
                _rehearse_update(config, variant, step)


def _rehearse_gradients(unit: Unit) -> None:
    """The norm and, if several gradients of a parameter may arrive in a step, their sums."""
    reduce_dtype, device = TORCH_DTYPE[unit.precision.reduce], unit.device
    shard = _SHARD.zeros(unit.gradients.grad_dtype, device)
    ops.sum_of_squares(shard)
    if not unit.sums_gradients:
        return
    ops.accumulate_(shard, _SHARD.zeros(reduce_dtype, device))
    for span in {_Span.like(segment.offset, segment.offset + segment.numel) for segment in unit.layout.segments}:
        grad = torch.zeros(span.numel, dtype=unit.parameters.unsharded_param.dtype, device=device)
        for flat_dtype in {unit.gradients.grad_dtype, reduce_dtype}:
            ops.accumulate_(span.zeros(flat_dtype, device), grad)


def _variants(config: OptimizerConfig, held: Held, unit: Unit, collectives: Collectives) -> Iterator[_Variant]:
    out = None if unit.parameters.master_is_param else unit.parameters.param_dtype
    places = [(_Part.RUN, run.start, run.stop, run) for run in held.runs]
    if isinstance(config, TorchConfig):  # one copy of the shard follows all of torch's own kernels
        places = [(_Part.RUN, 0, unit.layout.shard_numel, run) for run in held.runs[:1]]
    if isinstance(config, LambConfig):
        for part, pieces in (
            (_Part.PIECE, pieces_of(held, collectives.shard_rank)),
            (_Part.SQUARED, squared_pieces_of(held, collectives)),
        ):
            places += [(part, start, stop, run) for _, start, stop, run in pieces]
    for part, start, stop, run in places:
        span = _Span.like(start, stop, config.block_numel)
        yield _Variant(
            unit.device, unit.parameters.master_dtype, unit.gradients.grad_dtype, out, span, run.settings, part
        )


def _rehearse_update(config: OptimizerConfig, variant: _Variant, step: int) -> None:
    span, device = variant.span, variant.device
    master, grad = span.zeros(variant.master, device), span.zeros(variant.grad, device)
    out = None if variant.out is None else span.zeros(variant.out, device)
    if isinstance(config, TorchConfig):
        if out is not None:
            ops.cast_copy_(out, master)
        return
    states = tuple(span.zeros(TORCH_DTYPE[state.dtype], device, state.per) for state in config.held_states)
    numbers = StepNumbers(step, lambda _: 0.0, None, torch.ones((), device=device))
    run = Run(variant.settings, 0, span.numel)
    if not isinstance(config, LambConfig):
        update_of(config)(config, ShardSlice(master, grad, states, out), run, numbers)
        return
    settings = lamb_settings(config, run, numbers)
    exp_avg, exp_avg_sq = states
    if variant.part is _Part.RUN:
        ops.lamb_moments_(grad, exp_avg, exp_avg_sq, numbers.grad_scale, settings)
    elif variant.part is _Part.SQUARED:
        ops.lamb_squares(master, exp_avg, exp_avg_sq, settings)
    else:
        ops.lamb_(master, exp_avg, exp_avg_sq, numbers.grad_scale, settings, out)
