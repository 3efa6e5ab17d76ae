"""The predicted time of a step, by hand: what overlaps, what a stage sends, and what each part of the time is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_runtime.plan import OuterSharding, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import Mark, Trace
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.timing.costs import FREE, CollectiveCost, Curve, StepCosts
from zero_runtime.predict.timing.step_clock import StepClock
from zero_runtime.predict.timing.step_time import StepSeconds, step_time, surplus_s
from zero_runtime.state_bytes import UnitSize

UNITS, NUMEL, WORLD = 4, 1000, 2
FULL_BYTES = 4 * NUMEL
FP32 = MixedPrecision()


def marks_of(units: int) -> Trace:
    """Units that are used one after the other, forward and back."""
    trace = Trace()
    for unit in range(units):
        trace.mark(Mark.BEFORE_FORWARD, unit)
        trace.mark(Mark.AFTER_FORWARD, unit)
    for unit in reversed(range(units)):
        for kind in (Mark.BEFORE_BACKWARD, Mark.GRADIENT, Mark.AFTER_BACKWARD):
            trace.mark(kind, unit)
    return trace


TRACE = marks_of(UNITS)


def timed(
    stage: int,
    costs: StepCosts,
    *,
    model_s: float = 0.0,
    micro_batches: int = 1,
    prefetch: int = 1,
    kind: MixedPrecision = FP32,
    shard_ranks: int | None = None,
    at_boundary: bool = False,
    outer_sharding: OuterSharding | None = None,
) -> StepSeconds:
    """A step in which every segment between two marks takes equally long, and the model takes model_s."""
    plan = ZeroPlan.from_stage(stage, shard_ranks=shard_ranks, outer_sharding=outer_sharding)
    world = 2 * shard_ranks if shard_ranks else WORLD
    shards = plan.shard_count(world)
    rules = CountRules(
        plan, shards, world // shards, micro_batches, 8.0, by_messages=True, reduces_at_boundary=at_boundary
    )
    units = [(UnitSize(NUMEL, NUMEL, trainable=True), kind)] * UNITS
    between = len(TRACE.marks) - 1
    segments = [0.0, *[model_s / between] * between, 0.0]
    return step_time(TRACE, units, rules, segments, costs, prefetch=prefetch)


def constant(seconds: float) -> CollectiveCost:
    return CollectiveCost(rest=Curve([(0.0, seconds)]))


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_computing_beside_a_transfer_slows_both_and_the_rest_of_the_transfer_is_exposed() -> None:
    clock = StepClock(compute_slowdown=1.0, link_slowdown=0.5)
    transfer = clock.issue(3.0)
    clock.compute(1.0)  # 2 s beside the transfer, which comes 2 / 1.5 s far
    clock.wait(transfer)
    assert clock.computing_s == pytest.approx(2.0)
    assert clock.plain_s == 1.0
    assert clock.exposed_s == pytest.approx(3.0 - 2.0 / 1.5)


def test_computing_is_no_longer_slowed_when_the_transfer_has_ended() -> None:
    clock = StepClock(compute_slowdown=1.0)
    transfer = clock.issue(1.0)
    clock.compute(2.0)  # 0.5 of it in the 1 s of the transfer, the other 1.5 alone
    clock.wait(transfer)
    assert clock.computing_s == pytest.approx(2.5)
    assert clock.exposed_s == 0.0


def test_transfers_run_one_after_the_other() -> None:
    clock = StepClock()
    _, second = clock.issue(1.0), clock.issue(2.0)
    clock.wait(second)
    assert clock.exposed_s == pytest.approx(3.0)


def test_a_curve_is_straight_between_its_points_and_goes_on_behind_them() -> None:
    curve = Curve([(10.0, 1.0), (20.0, 3.0), (40.0, 4.0)])
    assert [curve.at(size) for size in (0, 10, 15, 20, 30, 40, 60)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert FREE.at(1e9) == 0.0
    assert Curve([(10.0, 1.0), (20.0, 0.5)]).at(1000.0) == 0.5  # points that scatter predict no negative times
    assert Curve.of_rate(0.5, 100.0).at(200.0) == pytest.approx(2.5)


# ---- what a step sends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_without_computing_all_collectives_are_exposed(stage: int) -> None:
    """Of stage 3: the last unit's parameters are freed after its forward and gathered again."""
    costs = StepCosts(gather=constant(1.0), reduce=constant(100.0), replica=constant(100.0))
    time = timed(stage, costs)
    gathers = (0, UNITS, UNITS, 2 * UNITS)[stage]
    assert time.exposed_s == pytest.approx(100 * UNITS + gathers)
    assert time.total_s == time.exposed_s


@pytest.mark.parametrize("stage", range(4))
def test_with_free_collectives_a_step_takes_as_long_as_the_model(stage: int) -> None:
    time = timed(stage, StepCosts(), model_s=5.0, micro_batches=3)
    assert time.model_s == pytest.approx(15.0)
    assert time.total_s == pytest.approx(15.0)


def test_prefetched_gathers_are_hidden_by_computing_and_others_are_not() -> None:
    costs = StepCosts(gather=constant(0.01))
    hidden, exposed = (timed(3, costs, model_s=100.0, prefetch=depth).exposed_s for depth in (1, 0))
    # With prefetch the first unit of the forward and that of the backward have nothing to hide behind.
    assert hidden == pytest.approx(2 * 0.01)
    assert exposed == pytest.approx(2 * UNITS * 0.01)


def test_gathers_after_a_step_are_hidden_by_the_next_forward() -> None:
    assert timed(1, StepCosts(gather=constant(0.01)), model_s=100.0).exposed_s == pytest.approx(0.01)


def test_only_the_last_reduction_is_exposed_where_the_backward_is_long() -> None:
    assert timed(2, StepCosts(reduce=constant(0.01)), model_s=100.0).exposed_s == pytest.approx(0.01)


@pytest.mark.parametrize(("stage", "at_boundary", "times"), [(1, False, 1), (2, False, 3), (3, False, 3), (2, True, 1)])
def test_gradients_are_reduced_in_each_backward_or_once(stage: int, at_boundary: bool, times: int) -> None:
    time = timed(stage, StepCosts(reduce=constant(1.0)), micro_batches=3, at_boundary=at_boundary)
    assert time.exposed_s == pytest.approx(times * UNITS)


def test_replicas_of_a_shard_are_reduced_too() -> None:
    time = timed(3, StepCosts(reduce=constant(1.0), replica=constant(10.0)), shard_ranks=2)
    assert time.exposed_s == pytest.approx(11.0 * UNITS)


def test_shard_groups_exchange_parameters_after_a_step() -> None:
    """A reduce-scatter or an all-gather across the groups is half of the all-reduce that replicas need."""
    costs = StepCosts(reduce=constant(1.0), replica=constant(10.0))
    time = timed(3, costs, shard_ranks=2, outer_sharding="optim", micro_batches=3)
    assert time.exposed_s == pytest.approx((3 * (1.0 + 5.0) + 5.0) * UNITS)
    hidden = timed(3, StepCosts(replica=constant(0.01)), shard_ranks=2, outer_sharding="optim", model_s=100.0)
    # The first unit's exchange, which its gather follows, and the last reduction have nothing to hide behind.
    assert hidden.exposed_s == pytest.approx(0.005 + 0.005)


def test_collectives_cost_by_the_bytes_of_their_dtype() -> None:
    """fp32 gradients and bf16 parameters: 4 and 2 bytes an element."""
    per_byte = CollectiveCost(rest=Curve([(0.0, 0.0), (1.0, 1.0)]))
    costs = StepCosts(gather=per_byte, reduce=per_byte)
    assert timed(3, costs, kind=MixedPrecision("bf16")).exposed_s == pytest.approx(UNITS * NUMEL * (2 * 2 + 4))


# ---- what the runtime does -------------------------------------------------------------------------------------------


def test_beginning_a_collective_takes_computing_time() -> None:
    costs = StepCosts(reduce=CollectiveCost(start=Curve([(0.0, 1.0)])))
    time = timed(2, costs)
    assert time.runtime_s == pytest.approx(UNITS)
    assert time.exposed_s == 0.0


def test_gradients_are_copied_once_and_added_in_later_micro_batches() -> None:
    """Stage 0 in fp32. A copy reads and writes 4 bytes an element, a sum reads 4 more."""
    per_byte = Curve([(0.0, 0.0), (1.0, 1.0)])
    one, three = (timed(0, StepCosts(copy=per_byte), micro_batches=count).runtime_s for count in (1, 3))
    assert one == pytest.approx(UNITS * 8 * NUMEL)
    assert three == pytest.approx(UNITS * (8 + 2 * 12) * NUMEL)


def test_gathered_parameters_are_cast_to_the_dtype_of_the_computation() -> None:
    """bf16 parameters that compute in fp32, stage 3: two gathers, each cast reads 2 and writes 4 bytes an element; the
    gradient is copied from fp32 to fp32."""
    per_byte = Curve([(0.0, 0.0), (1.0, 1.0)])
    time = timed(3, StepCosts(copy=per_byte), kind=MixedPrecision("bf16", compute="fp32"))
    assert time.runtime_s == pytest.approx(UNITS * NUMEL * (2 * 6 + 8))


def test_reduced_shards_of_later_micro_batches_are_added() -> None:
    """Stage 2: each backward copies its gradients, and the second adds its shard of fp32 sums, 12 bytes an element."""
    per_byte = Curve([(0.0, 0.0), (1.0, 1.0)])
    time = timed(2, StepCosts(copy=per_byte), micro_batches=2)
    assert time.runtime_s == pytest.approx(UNITS * (2 * 8 * NUMEL + 12 * NUMEL / WORLD))


@pytest.mark.parametrize(("stage", "share"), [(0, 1), (1, WORLD), (2, WORLD), (3, WORLD)])
def test_a_rank_updates_its_shard(stage: int, share: int) -> None:
    per_element = Curve([(0.0, 0.0), (1.0, 1.0)])
    assert timed(stage, StepCosts(update=per_element)).update_s == pytest.approx(UNITS * NUMEL / share)


@pytest.mark.parametrize(("stage", "meetings"), [(0, 2), (1, 2), (2, 3 + 1), (3, 3 * 3)])
def test_each_exchange_of_messages_takes_its_addition(stage: int, meetings: int) -> None:
    """By unit, with three micro-batches: stages 0 and 1 reduce once, which is two exchanges in stage 0; stage 1 also
    gathers once; stage 2 reduces in each backward; stage 3 also gathers in each forward and backward."""
    assert timed(stage, StepCosts(surplus_s=1.0), micro_batches=3).surplus_s == pytest.approx(meetings * UNITS)


def test_the_addition_is_found_again_in_a_real_step() -> None:
    costs = StepCosts(gather=constant(0.3), reduce=constant(0.2), update=Curve([(0.0, 0.5)]), compute_slowdown=0.5)
    real = timed(2, replace(costs, surplus_s=0.7), model_s=2.0)
    plan = ZeroPlan.from_stage(2)
    rules = CountRules(plan, WORLD, 1, 1, 8.0, by_messages=True)
    units = [(UnitSize(NUMEL, NUMEL, trainable=True), FP32)] * UNITS
    between = len(TRACE.marks) - 1
    segments = [0.0, *[2.0 / between] * between, 0.0]
    assert surplus_s(real.total_s, TRACE, units, rules, segments, costs, prefetch=1) == pytest.approx(0.7)
    assert surplus_s(0.1, TRACE, units, rules, segments, costs, prefetch=1) == 0.0  # faster than its prediction


def test_the_parts_add_up() -> None:
    costs = StepCosts(
        gather=constant(0.3),
        reduce=constant(0.2),
        control_s=0.1,
        surplus_s=0.01,
        copy=Curve([(0.0, 1e-3)]),
        update=Curve([(0.0, 0.5)]),
        compute_slowdown=0.5,
        link_slowdown=0.25,
    )
    time = timed(3, costs, model_s=2.0)
    assert time.control_s == pytest.approx(0.2)
    assert time.slowed_s > 0.0
    free = replace(costs, gather=CollectiveCost(), reduce=CollectiveCost(), surplus_s=0.0)
    waits = time.exposed_s + time.slowed_s + time.surplus_s
    assert time.total_s == pytest.approx(timed(3, free, model_s=2.0).total_s + waits)
