"""The peak of a step, from traces and units written by hand: the same by its lines as by brute force, and the bytes
between steps are those of the closed form."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product

import pytest

from zero_runtime.offload import copy_streams
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory import counted_unit
from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace
from zero_runtime.predict.memory.counted_unit import GATHERED, GRADS, WHOLE_GRADS, CountRules
from zero_runtime.predict.memory.step_memory import (
    Level,
    StatesReplay,
    StepMemory,
    StepPeaks,
    replay_states,
)
from zero_runtime.state_bytes import UnitSize, model_state_bytes

STATE_BYTES = 8.0
PLANS = [ZeroPlan.from_stage(row) for row in range(4)]
KINDS = [
    MixedPrecision(),
    MixedPrecision("bf16"),
    MixedPrecision("bf16", compute="fp32"),
    MixedPrecision("bf16", "bf16", "bf16", "bf16"),
]
UNITS = 3


def trace_of(micro: int, draw: random.Random | None = None, units: int = UNITS) -> Trace:
    """Units that are used one after the other. Each keeps a storage, and passes another to the next.

    draw: for the bytes of a sequence and for constant bytes; None: 100 bytes of a sequence.
    """

    def size() -> int:
        return 100 * micro if draw is None else draw.randrange(500) + micro * draw.randrange(200)

    trace = Trace()
    kept = []
    for unit in range(units):
        trace.mark(Mark.BEFORE_FORWARD, unit)
        kept.append(trace.came(size(), in_block=True))
        for _ in range(3):  # of which another is the largest at another micro-batch
            trace.went(trace.came(size(), in_block=True))
        trace.mark(Mark.AFTER_FORWARD, unit)
    trace.forward_end = len(trace.events)
    for unit in reversed(range(units)):
        trace.mark(Mark.BEFORE_BACKWARD, unit)
        made = trace.came(size(), in_block=False)
        trace.went(kept[unit])
        trace.mark(Mark.GRADIENT, unit)
        trace.went(made)
        trace.mark(Mark.AFTER_BACKWARD, unit)
    return trace


def rules_of(plan: ZeroPlan, world: int = 2, micro_batches: int = 1, *, by_messages: bool = False) -> CountRules:
    shards = plan.shard_count(world)
    return CountRules(plan, shards, world // shards, micro_batches, STATE_BYTES, by_messages)


def sizes(*numels: int, frozen: int | None = None) -> list[UnitSize]:
    return [UnitSize(numel, numel, trainable=place != frozen) for place, numel in enumerate(numels)]


def replayed(units: list[UnitSize], kind: MixedPrecision, rules: CountRules, prefetch: int = 1) -> StatesReplay:
    trace = trace_of(1)
    trace.marks = [mark for mark in trace.marks if units[mark[2]].trainable or mark[1] is not Mark.GRADIENT]
    return replay_states(trace, [(unit, kind) for unit in units], rules, prefetch=prefetch)


# ---- the lines of a StepMemory ---------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[StepMemory, StatesReplay]:
    """A step with random sizes of storages and units, of micro-batches from 2 to 9, and the replay that it is from."""
    draw = random.Random(seed)
    small, large = (trace_of(micro, random.Random(seed)) for micro in (2, 9))
    linear = LinearTrace.between((2, small), (9, large))
    assert linear is not None
    rules = rules_of(draw.choice(PLANS), 2, draw.choice((1, 2, 5)), by_messages=draw.random() < 0.5)
    rules = replace(rules, reads_peers=rules.by_messages and draw.random() < 0.5)
    units = [(unit, draw.choice(KINDS)) for unit in sizes(*(8 * draw.randrange(1, 60) for _ in range(UNITS)))]
    states = replay_states(linear.trace, units, rules, prefetch=draw.randrange(3))
    return StepMemory(linear, StepPeaks.of(linear, states), (16 * draw.randrange(4), 0), draw.randrange(50)), states


def by_force(memory: StepMemory, states: StatesReplay, micro: int) -> int:
    """The most bytes at any moment: every event with the level that the mark before it left, and every mark's own."""
    trace = memory.linear.at(micro)
    levels = [states.start, *states.marks]
    bounds = [0, *(mark[0] for mark in trace.marks), len(trace.events), len(trace.events)]
    highest = states.step.highest
    for level, start, stop in zip(levels, bounds[:-1], bounds[1:], strict=True):
        highest = max(highest, level.highest + sum(trace.parts(start)))
        highest = max(highest, *(level.left + sum(trace.parts(place)) for place in range(start, stop + 1)))
    return highest + memory.buffers + sum(memory.inputs) * micro


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_the_most_of_all_moments_and_the_largest_micro_batch_is_the_last_that_fits(seed: int) -> None:
    (memory, states), micros = drawn(seed), range(2, 10)
    peaks = {micro: memory.peak(micro) for micro in micros}
    expected = {micro: by_force(memory, states, micro) for micro in micros}
    assert {micro: peak.total for micro, peak in peaks.items()} == expected
    for peak in peaks.values():
        assert peak.total == sum(peak.states.values()) + peak.activations + peak.inputs + peak.buffers
    draw = random.Random(seed)
    totals = [peak.total for peak in peaks.values()]
    limits = [draw.randrange(totals[-1] * 2) for _ in range(50)]
    for limit in (0, *limits, *totals, *(total - 1 for total in totals)):
        fitting = [micro for micro, peak in peaks.items() if peak.total <= limit]
        assert memory.largest(limit) == max(fitting, default=0), limit


def test_the_optimizers_step_may_be_the_worst_moment() -> None:
    memory, states = drawn(0)
    states = replace(states, step=Level(10**6, {GRADS: 10**6}, 0, {}))
    memory.peaks = StepPeaks.of(memory.linear, states)
    found = memory.peak(2)
    assert (found.when, found.activations) == ("in the optimizer's step", 0)
    assert found.total == by_force(memory, states, 2)
    assert memory.largest(found.total - 1) == 0


def test_few_moments_are_kept_and_they_are_read_back_as_they_were_written() -> None:
    memory, _ = drawn(3)
    plain = json.loads(json.dumps(memory.peaks.plain()))
    assert StepPeaks.of_plain(plain) == memory.peaks
    assert len(memory.peaks.moments) < len(memory.linear.trace.marks)


# ---- the replay of the runtime's half --------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "kind", "micro_batches"), list(product(PLANS, KINDS, (1, 2, 7))))
def test_between_steps_there_are_the_model_states_without_gradients(
    plan: ZeroPlan, kind: MixedPrecision, micro_batches: int
) -> None:
    units = sizes(80, 24, 160, frozen=1)
    for world in (1, 2, 4):
        found = replayed(units, kind, rules_of(plan, world, micro_batches)).between_steps
        pairs = [(unit, kind) for unit in units]
        expected = model_state_bytes(plan, pairs, world=world, micro_batches=micro_batches, state_bytes=STATE_BYTES)
        assert found == expected.total - expected.grads


def test_frozen_units_have_no_gradients_and_no_optimizer_states() -> None:
    for plan, kind in product(PLANS, KINDS):
        units = [UnitSize(80, 80, trainable=False) for _ in range(UNITS)]
        found = replayed(units, kind, rules_of(plan, 4, 3))
        everything = (found.start, found.step, *found.marks)
        assert not any(level.at_highest[GRADS] for level in everything)
        assert found.between_steps == model_state_bytes(plan, [(unit, kind) for unit in units], world=4).params


def test_a_group_of_ranks_shards_as_many_bytes_as_a_world_of_its_size() -> None:
    for row in (1, 2, 3):
        for kind in KINDS:
            hybrid, alone = ZeroPlan.from_stage(row, shard_ranks=2), ZeroPlan.from_stage(row)
            units = sizes(80, 24, 160)
            found = replayed(units, kind, rules_of(hybrid, 4)), replayed(units, kind, rules_of(alone, 2))
            assert found[0] == found[1]


def test_on_gloo_the_replicas_of_a_shard_are_received_too() -> None:
    hybrid, alone = ZeroPlan.from_stage(2, shard_ranks=2), ZeroPlan.from_stage(2)
    units = sizes(800, 800, 800)
    of_group = replayed(units, KINDS[0], rules_of(hybrid, 8, by_messages=True))
    of_world = replayed(units, KINDS[0], rules_of(alone, 2, by_messages=True))
    received = 3 * (800 // 2 // 4) * 4  # from three replicas their terms of a quarter of the shard, in fp32
    assert max(level.highest for level in of_group.marks) == max(level.highest for level in of_world.marks) + received


def test_full_parameters_of_the_row_that_shards_them_exist_while_used_and_one_ahead() -> None:
    plan, units = ZeroPlan.from_stage(3), sizes(80, 80, 80)
    for prefetch, together in ((0, 1), (1, 2), (2, 3)):
        found = replayed(units, MixedPrecision(), rules_of(plan, 4), prefetch)
        forward = [level for level, (_, kind, _) in zip(found.marks, trace_of(1).marks, strict=False) if kind <= 1]
        assert max(level.at_highest[GATHERED] for level in forward) == together * 80 * 4


def test_later_micro_batches_find_the_gradients_of_those_before() -> None:
    units = sizes(80, 80, 80)
    for plan in PLANS:
        one, two, many = (replayed(units, MixedPrecision(), rules_of(plan, 2, count)) for count in (1, 2, 9))
        shards = 1 if plan.keeps_full_grads else 2
        assert one.start.at_left[GRADS] == 0
        assert two.start.at_left[GRADS] == many.start.at_left[GRADS] == 3 * 80 // shards * 4


def test_gradients_that_are_reduced_at_the_boundary_are_kept_in_full_until_then() -> None:
    """Summed in fp32, cast to bf16 for the reduction, and kept as a shard in fp32 after it."""
    units, kind = sizes(80, 80, 80), MixedPrecision("bf16", "bf16", "fp32", "fp32")
    for row in (2, 3):
        rules = replace(rules_of(ZeroPlan.from_stage(row), 2, 3), reduces_at_boundary=True)
        found = replayed(units, kind, rules)
        assert found.start.at_left[WHOLE_GRADS] == 3 * 80 * 4
        assert max(level.at_highest[WHOLE_GRADS] for level in found.marks) == 3 * 80 * 4 + 80 * 2
        assert found.between_steps == replayed(units, kind, rules_of(rules.plan, 2, 3)).between_steps


def test_parameters_that_are_cast_for_computing_exist_twice_during_a_gather() -> None:
    found = replayed(sizes(80, 80, 80), MixedPrecision("bf16", compute="fp32"), rules_of(ZeroPlan.from_stage(3)), 0)
    assert max(level.at_highest[GATHERED] for level in found.marks) == 80 * 4 + 80 * 2


def test_as_many_sources_of_copies_are_held_as_in_the_runtime() -> None:
    assert counted_unit.HELD_SOURCES == copy_streams.HELD_SOURCES
