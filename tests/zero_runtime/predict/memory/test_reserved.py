"""The tensors of a step reach the model of the allocator in program order, each once."""

from __future__ import annotations

import pytest

from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.memory.reserved import reserved_peak
from zero_runtime.predict.memory.step_memory import StepMemory, StepPeaks, replay_states
from zero_runtime.state_bytes import UnitSize

MIB = 1 << 20
UNITS = 4
NUMEL = 4 * MIB  # elements of a unit: 16 MiB in fp32


def trace(activation: int, *, trained: bool = True) -> Trace:
    """Each unit keeps one activation; its backward creates one more."""
    made = Trace()
    kept = []
    for unit in range(UNITS):
        made.mark(Mark.BEFORE_FORWARD, unit)
        kept.append(made.came(activation, in_block=True))
        made.mark(Mark.AFTER_FORWARD, unit)
    made.forward_end = len(made.events)
    for unit in reversed(range(UNITS)):
        made.mark(Mark.BEFORE_BACKWARD, unit)
        passing = made.came(activation, in_block=False)
        if trained:
            made.mark(Mark.GRADIENT, unit)
        made.went(passing)
        made.went(kept.pop())
        made.mark(Mark.AFTER_BACKWARD, unit)
    return made


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_of_large_tensors_the_allocated_bytes_are_the_predicted_peak(stage: int, micro_batches: int) -> None:
    """All tensors are multiples of 2 MiB, so that rounding adds nothing to what is allocated."""
    units = [(UnitSize(NUMEL, NUMEL, trainable=True), MixedPrecision())] * UNITS
    rules = CountRules(ZeroPlan.from_stage(stage), 1, 1, micro_batches, 8.0, by_messages=False)
    step = trace(16 * MIB)
    found = reserved_peak(step, units, rules, prefetch=1, other=(32 * MIB,))
    linear, states = LinearTrace.of_one(1, step), replay_states(step, units, rules, prefetch=1)
    tensors = StepMemory(linear, StepPeaks.of(linear, states)).peak(1).total + 32 * MIB
    assert found.allocated == tensors
    assert found.reserved >= tensors
    assert found.reserved % (20 * MIB) == 0


def test_small_tensors_share_pages_of_2_mib() -> None:
    units = [(UnitSize(256, 256, trainable=False), MixedPrecision())] * UNITS
    rules = CountRules(ZeroPlan.from_stage(0), 1, 1, 1, 8.0, by_messages=False)
    found = reserved_peak(trace(1000, trained=False), units, rules, prefetch=1)
    # A unit's parameters are two blocks of 512 bytes. So are its activations, of which all four and one more exist.
    assert found.allocated == (UNITS + UNITS + 1) * 1024
    assert found.reserved == 2 * MIB


@pytest.mark.parametrize("stage", [0, 3])
def test_a_replay_ends_once_more_is_reserved_than_is_asked_about(stage: int) -> None:
    units = [(UnitSize(NUMEL, NUMEL, trainable=True), MixedPrecision())] * UNITS
    rules = CountRules(ZeroPlan.from_stage(stage), 1, 1, 1, 8.0, by_messages=False)
    step = trace(16 * MIB)
    whole = reserved_peak(step, units, rules, prefetch=1)
    assert reserved_peak(step, units, rules, prefetch=1, at_most=whole.reserved) == whole
    part = reserved_peak(step, units, rules, prefetch=1, at_most=whole.reserved // 2)
    assert whole.reserved // 2 < part.reserved < whole.reserved
