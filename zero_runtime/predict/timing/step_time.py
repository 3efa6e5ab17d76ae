"""The predicted time of a training step: the runtime's schedule replayed with a clock. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import Mark, Trace
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.memory.step_memory import StepReplay
from zero_runtime.predict.timing.costs import StepCosts
from zero_runtime.predict.timing.step_clock import StepClock
from zero_runtime.predict.timing.timed_unit import TimedUnit
from zero_runtime.state_bytes import UnitSize

STEPS = 3  # the first records the order of the units; the gathers at the end of the second run beside the third


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step of a rank.

    model_s: the model's own forward, backward and recomputation; slowed_s: by how much more that took beside
    collectives; runtime_s: copies, casts and the beginning of collectives; exposed_s: waiting for collectives;
    update_s: the optimizer's step; control_s: sums over the ranks, which block; surplus_s: what a real step takes in
    addition to all of these (`StepCosts.surplus_s`).
    """

    model_s: float
    slowed_s: float
    runtime_s: float
    exposed_s: float
    update_s: float
    control_s: float
    surplus_s: float

    @property
    def total_s(self) -> float:
        return sum(astuple(self))

    def slower(self, factor: float) -> StepSeconds:
        """With the time that ranks wait for a slower one, which makes the step longer by this factor."""
        return replace(self, surplus_s=self.surplus_s + (factor - 1) * self.total_s)


def step_time(
    trace: Trace,
    units: Sequence[tuple[UnitSize, MixedPrecision]],
    rules: CountRules,
    segments: Sequence[float],
    costs: StepCosts,
    *,
    prefetch: int,
) -> StepSeconds:
    """The time of a steady step.

    trace: of one micro-batch. segments: seconds of the model's own work before each mark of the trace and after the
    last, see segments.py.
    """
    clock = StepClock(costs.compute_slowdown, costs.link_slowdown)
    replay = StepReplay(
        trace,
        units,
        rules,
        prefetch=prefetch,
        reached=lambda place: clock.compute(segments[place]),
        make_unit=partial(TimedUnit, clock, costs),
        at_most=rules.micro_batches,
    )
    for _ in range(STEPS - 1):
        replay.step()
    computed_s, exposed_s, plain_s, meetings = clock.computing_s, clock.exposed_s, clock.plain_s, clock.meetings
    sent_s = clock.sent_s
    replay.step()
    model_s = sum(segments) * rules.micro_batches
    plain_s = clock.plain_s - plain_s
    exposed_s = clock.exposed_s - exposed_s
    return StepSeconds(
        model_s=model_s,
        slowed_s=max(clock.computing_s - computed_s - plain_s, 0.0),  # differences of sums, which are rounded
        runtime_s=max(plain_s - model_s, 0.0),
        exposed_s=exposed_s + costs.unhidden * max(clock.sent_s - sent_s - exposed_s, 0.0),
        update_s=_update_s(trace, units, rules, segments, costs),
        control_s=2 * costs.control_s,  # the number of tokens, and the norm
        surplus_s=costs.surplus_s * (clock.meetings - meetings or rules.micro_batches),
    )


def _update_s(
    trace: Trace,
    units: Sequence[tuple[UnitSize, MixedPrecision]],
    rules: CountRules,
    segments: Sequence[float],
    costs: StepCosts,
) -> float:
    """The optimizer's step, as far as the next step waits for it.

    An update outside of the device goes on in the next forward, unit by unit in its order. The forward waits for the
    first unit at least, and for what the updates take longer than the forward.
    """
    away = [one.optimizer_offloaded and one.separate_memory and costs.host_update is not None for one, _ in units]
    numels = [size.padded_numel // rules.shard_count if size.trainable else 0 for size, _ in units]
    on_device = sum(numel for numel, is_away in zip(numels, away, strict=True) if not is_away)
    outside = [numel for numel, is_away in zip(numels, away, strict=True) if is_away and numel]
    seconds = costs.update.at(on_device) if on_device else 0.0
    if not outside or costs.host_update is None:
        return seconds
    last = max(place for place, (_, kind, _) in enumerate(trace.marks) if kind is Mark.AFTER_FORWARD)
    host_s = costs.host_update.at(sum(outside))
    return seconds + max(host_s - sum(segments[: last + 1]), host_s / len(outside))


def surplus_s(
    step_s: float,
    trace: Trace,
    units: Sequence[tuple[UnitSize, MixedPrecision]],
    rules: CountRules,
    segments: Sequence[float],
    costs: StepCosts,
    *,
    prefetch: int,
) -> float:
    """`StepCosts.surplus_s` from a real step that took step_s, and its prediction without it; never negative."""
    alone = step_time(trace, units, rules, segments, replace(costs, surplus_s=1.0), prefetch=prefetch)
    return max(step_s - (alone.total_s - alone.surplus_s), 0.0) / alone.surplus_s
