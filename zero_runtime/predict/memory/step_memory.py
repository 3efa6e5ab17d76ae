"""The memory of a rank's training step in program order: the runtime's schedule replayed over a trace of a model.

[Note: two halves of a step]
A step's tensors are those of the model's own code (activations: a `Trace`) and those of the runtime (parameters,
gradients, states: `CountedUnit`s). The first depend on neither the plan nor the offload nor the number of ranks, and
the second do not depend on the batch. The runtime's bytes change only at the marks of the trace, and the activations'
bytes are linear in the micro-batch at each event. So the highest sum of the two is found without a replay for each
size of the micro-batch. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace
from zero_runtime.predict.memory.counted_unit import TRANSFERS, Book, Copying, CountedUnit, CountRules
from zero_runtime.schedule import Schedule
from zero_runtime.state_bytes import UnitSize

STEPS = 2  # the first records the order of the units, as in the runtime
DISTINCT = 3  # micro-batches that differ: the first, those after it, and the last


@dataclass(frozen=True)
class Level:
    """Bytes of the runtime at a mark: the most while it handles the mark, and those that it leaves; by component."""

    highest: int
    at_highest: dict[str, int]
    left: int
    at_left: dict[str, int]


@dataclass(frozen=True)
class StatesReplay:
    """The runtime's half of a step: a level for each mark of the trace (the worst of the micro-batches), the levels at
    the start of a micro-batch and in the optimizer's step, the bytes between two steps, and how often each unit is
    gathered in a step."""

    start: Level
    marks: list[Level]
    step: Level
    between_steps: int
    gathers: tuple[int, ...] = ()


def replay_states(
    trace: Trace, units: Sequence[tuple[UnitSize, MixedPrecision]], rules: CountRules, *, prefetch: int
) -> StatesReplay:
    """Replay the marks of one micro-batch's trace through the runtime's schedule for a complete step."""
    replay = StepReplay(trace, units, rules, prefetch=prefetch)
    for _ in range(STEPS):
        levels, step = replay.step()
    start, *marks = [_worse(of_place) for of_place in zip(*levels, strict=True)]
    return StatesReplay(start, marks, step, replay.book.total, replay.gathers)


MakeUnit = Callable[[UnitSize, MixedPrecision, CountRules, Book, Copying], CountedUnit]


class StepReplay:
    """The runtime's half of training steps, in program order.

    reached: called before each mark, with its place among the trace's marks, and at the end of a micro-batch, with
    their number. make_unit: a CountedUnit or a subclass of it. at_most: micro-batches of a step that are replayed.
    gathers: of each unit in the last step.
    """

    def __init__(
        self,
        trace: Trace,
        units: Sequence[tuple[UnitSize, MixedPrecision]],
        rules: CountRules,
        *,
        prefetch: int,
        book: Book | None = None,
        reached: Callable[[int], None] = lambda _place: None,
        make_unit: MakeUnit = CountedUnit,
        at_most: int = DISTINCT,
    ) -> None:
        self.book = book or Book()
        self.gathers: tuple[int, ...] = ()
        self._trace, self._rules, self._reached, self._at_most = trace, rules, reached, at_most
        self._copying = Copying(self.book)
        self._units = [make_unit(size, precision, rules, self.book, self._copying) for size, precision in units]
        self._schedule = Schedule(self._units, rules.plan, prefetch=prefetch)
        # As `ZeroRuntime` renews: the root's unit first, which the next forward uses first.
        is_root = {unit: size.is_root for unit, (size, _) in zip(self._units, units, strict=True)}
        self._renewal = sorted(self._units, key=lambda unit: not is_root[unit])
        self._renew()

    def step(self) -> tuple[list[list[Level]], Level]:
        """One step: for each micro-batch that differs, the levels at its start, at each mark and when its backward has
        ended; and the level in the optimizer's step."""
        count = min(self._rules.micro_batches, self._at_most)
        levels, gathered = [], [self._gathered()]
        for micro in range(count):
            levels.append(self._micro_batch(boundary=micro == count - 1))
            gathered.append(self._gathered())
        self.book.begin()
        self._copying.release()
        self.book.free(self.book.allocate(TRANSFERS, self._rules.updating_bytes))
        for unit in self._units:
            unit.update()
        self._copying.release()
        for unit in self._units:
            unit.free_grads()
        self._schedule.after_step()
        self._renew()
        self._count_gathers(gathered)
        return levels, _level(self.book)

    def _gathered(self) -> list[int]:
        return [unit.gathers for unit in self._units]

    def _count_gathers(self, gathered: Sequence[Sequence[int]]) -> None:
        """gathered: the counts before the step and after each micro-batch that was replayed. The second micro-batch
        stands for those that were left out."""
        found = [now - before for now, before in zip(self._gathered(), gathered[0], strict=True)]
        if left_out := self._rules.micro_batches - len(gathered) + 1:
            found = [
                count + left_out * (after - before)
                for count, before, after in zip(found, gathered[1], gathered[2], strict=True)
            ]
        self.gathers = tuple(found)

    def _renew(self) -> None:
        for unit in self._renewal:
            unit.renew()

    def _micro_batch(self, *, boundary: bool) -> list[Level]:
        self.book.begin()
        levels = [_level(self.book)]
        for place, (_, kind, unit) in enumerate(self._trace.marks):
            self._reached(place)
            self.book.begin()
            if kind not in _FORWARD and not self._schedule.in_backward:
                self._begin_backward(boundary)
            self._report(kind, self._units[unit])
            levels.append(_level(self.book))
        self._reached(len(self._trace.marks))
        self.book.begin()
        if not self._schedule.in_backward:
            self._begin_backward(boundary)
        self._schedule.end_backward()
        return [*levels, _level(self.book)]

    def _begin_backward(self, boundary: bool) -> None:
        order = self._schedule.own_reduction_order
        if order is not None:
            self._schedule.set_reduction_order(order)
        self._schedule.begin_backward(boundary=boundary, synced=boundary or not self._rules.reduces_at_boundary)

    def _report(self, kind: Mark, unit: CountedUnit) -> None:
        schedule = self._schedule
        if kind == Mark.BEFORE_FORWARD:
            schedule.before_unit_forward(unit)
        elif kind == Mark.AFTER_FORWARD:
            schedule.after_unit_forward(unit)
        elif kind == Mark.BEFORE_BACKWARD:
            schedule.before_unit_backward(unit)
        elif kind == Mark.GRADIENT:
            unit.take_grad(sums_locally=schedule.sums_locally)
        else:
            schedule.after_unit_backward(unit)


_FORWARD = (Mark.BEFORE_FORWARD, Mark.AFTER_FORWARD)


def _level(book: Book) -> Level:
    return Level(book.highest, book.at_highest, book.total, dict(book.now))


def _worse(levels: Sequence[Level]) -> Level:
    """The highest of the same mark in several micro-batches."""
    highest = max(levels, key=lambda level: level.highest)
    left = max(levels, key=lambda level: level.left)
    return Level(highest.highest, highest.at_highest, left.left, left.at_left)


@dataclass(frozen=True)
class Peak:
    """The worst moment of a step on one rank's device, in bytes.

    states: of the runtime by component. blocks, outside, backward: activations that the forward created in the repeated
    blocks and outside of them, and what the backward created. inputs: token ids and labels of the step's micro-batches.
    when: the moment in words.
    """

    total: int
    states: dict[str, int]
    blocks: int
    outside: int
    backward: int
    inputs: int
    buffers: int
    when: str

    @property
    def activations(self) -> int:
        return self.blocks + self.outside + self.backward


Sized = tuple[int, int]  # bytes at the lowest micro-batch, and bytes for each sequence more


class WorstMoment(NamedTuple):
    """A moment that is the worst at some micro-batch. when: in words. states: bytes of the runtime by component.
    blocks, outside, backward: as in `Peak`, as lines over the micro-batch."""

    when: str
    states: dict[str, int]
    blocks: Sized
    outside: Sized
    backward: Sized

    @property
    def line(self) -> Sized:
        """All bytes of the moment, without inputs and buffers."""
        parts = (self.blocks, self.outside, self.backward)
        return sum(self.states.values()) + sum(base for base, _ in parts), sum(slope for _, slope in parts)


@dataclass(frozen=True)
class StepPeaks:
    """What decides the memory of a step at any micro-batch from `low` to `high`: a small part of a trace and a replay.

    moments: all that can be the worst, in the order of the step; the optimizer's step comes last. between_steps,
    gathers: of the replay.
    """

    low: int
    high: int
    moments: tuple[WorstMoment, ...]
    between_steps: int
    gathers: tuple[int, ...] = ()

    @classmethod
    def of(cls, linear: LinearTrace, states: StatesReplay, names: Sequence[str] = ()) -> StepPeaks:
        """From a trace and the replay of its marks. names: of the units."""
        found = _Moments(linear, states, names).worst()
        step = WorstMoment("in the optimizer's step", states.step.at_highest, (0, 0), (0, 0), (0, 0))
        return cls(linear.low, linear.high, (*found, step), states.between_steps, states.gathers)

    def plain(self) -> dict[str, Any]:
        """As plain data for JSON; `of_plain` is the inverse."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> StepPeaks:
        moments = tuple(
            WorstMoment(when, states, *((base, slope) for base, slope in lines))
            for when, states, *lines in data["moments"]
        )
        return cls(**{**data, "moments": moments, "gathers": tuple(data["gathers"])})


class StepMemory:
    """The memory of one row's step for all micro-batches of a `LinearTrace`.

    trace: it, or a function that reads it when it is first needed. inputs: bytes of what the model reads and of the
    labels, of all the step's micro-batches together, for each sample of a micro-batch. buffers: bytes of the model's
    buffers on the device.
    """

    def __init__(
        self,
        trace: LinearTrace | Callable[[], LinearTrace],
        peaks: StepPeaks,
        inputs: tuple[int, int] = (0, 0),
        buffers: int = 0,
    ) -> None:
        self._trace = trace
        self.peaks, self.inputs, self.buffers = peaks, inputs, buffers

    @cached_property
    def linear(self) -> LinearTrace:
        return self._trace if isinstance(self._trace, LinearTrace) else self._trace()

    def peak(self, micro: int) -> Peak:
        """The worst moment at a micro-batch from low to high; the first of several equal ones."""
        more = micro - self.peaks.low

        def at(line: Sized) -> int:
            return line[0] + line[1] * more

        worst = max(self.peaks.moments, key=lambda one: at(one.line))
        parts = at(worst.blocks), at(worst.outside), at(worst.backward)
        inputs = sum(self.inputs) * micro
        total = sum(worst.states.values()) + sum(parts) + inputs + self.buffers
        return Peak(total, worst.states, *parts, inputs=inputs, buffers=self.buffers, when=worst.when)

    def largest(self, limit: int) -> int:
        """The largest micro-batch of at most `high` whose peak is at most `limit` bytes; 0 if not even `low` fits."""
        room, low = limit - self.buffers, self.peaks.low
        inputs = sum(self.inputs)
        best = self.peaks.high
        for base, slope in (one.line for one in self.peaks.moments):
            left = room - base - inputs * low
            if left < 0:
                return 0
            if slope + inputs:
                best = min(best, low + left // (slope + inputs))
        return best


class _Moment(NamedTuple):
    """A candidate for the worst moment: its bytes at the lowest and at the highest micro-batch, without inputs and
    buffers; its mark, the number of events before it, and whether the runtime is handling the mark."""

    at_low: int
    at_high: int
    place: int
    position: int
    is_highest: bool


@dataclass
class _Moments:
    """The moments of a step that can be the worst at some micro-batch."""

    linear: LinearTrace
    states: StatesReplay
    names: Sequence[str]

    def worst(self) -> list[WorstMoment]:
        """These moments, in the order of the step.

        They are the lines that no other one reaches at both ends. Where two are equal, the first is the worst, as `max`
        chooses.
        """
        moments = list(self._all())
        kept: list[int] = []
        most, first_of_most = -1, 0
        for number in sorted(range(len(moments)), key=lambda one: -moments[one].at_low):
            at_high = moments[number].at_high
            if at_high < most or (at_high == most and number > first_of_most):
                continue  # a line that another one reaches at both ends is below it between them too
            most, first_of_most = at_high, number
            kept.append(number)
        return [self._worst(moments[number]) for number in sorted(kept)]

    def _all(self) -> Iterator[_Moment]:
        """All moments: while the runtime handles a mark, and those of the activations after it."""
        span = self.linear.high - self.linear.low
        levels = [self.states.start, *self.states.marks]
        for place, (level, candidates) in enumerate(zip(levels, self.linear.segments, strict=True)):
            found = [(level.highest, True, candidates[0]), *((level.left, False, one) for one in candidates)]
            for of_runtime, is_highest, (position, (base, slope)) in found:
                at_low = of_runtime + base
                yield _Moment(at_low, at_low + slope * span, place, position, is_highest)

    def _worst(self, moment: _Moment) -> WorstMoment:
        level = self.states.start if moment.place == 0 else self.states.marks[moment.place - 1]
        states = level.at_highest if moment.is_highest else level.at_left
        return WorstMoment(self._when(moment), states, *self.linear.parts(moment.position))

    def _when(self, moment: _Moment) -> str:
        trace = self.linear.trace
        if moment.place == 0:
            return "at the start of the forward"
        if moment.place > len(trace.marks):
            return "at the end of the backward"
        _, kind, unit = trace.marks[moment.place - 1]
        if kind == Mark.AFTER_FORWARD and moment.position > trace.forward_end:
            return "in the backward of the loss"
        name = self.names[unit] if unit < len(self.names) else f"unit {unit}"
        return f"{_WORDS[kind]} {name}"


_WORDS = {
    Mark.BEFORE_FORWARD: "in the forward of",
    Mark.AFTER_FORWARD: "after the forward of",
    Mark.BEFORE_BACKWARD: "in the backward of",
    Mark.GRADIENT: "at the gradients of",
    Mark.AFTER_BACKWARD: "after the backward of",
}
