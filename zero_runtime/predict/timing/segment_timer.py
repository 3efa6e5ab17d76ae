"""Measures how long the segments of a model's step take: forward, loss and backward without the runtime's own work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from zero_runtime.activations.recompute import Recomputation
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.module_hooks import ModuleHooks
from zero_runtime.predict.memory.activation_count import Mark, Trace
from zero_runtime.predict.memory.activation_trace import MarkedUnit, MarkingSchedule, give_parameters
from zero_runtime.predict.timing.segments import Key, SegmentTable
from zero_runtime.unit_planner import UnitRules, plan_units

Stamp = float | torch.cuda.Event
SPREAD = 0.02  # standard deviation of matrices: as GPT-2's, so that no number is denormal


class SegmentTimer:
    """Steps of one model on one device, timed by segment. Takes over the model, which must be on the meta device."""

    def __init__(
        self,
        model: nn.Module,
        rules: UnitRules,
        recompute: RecomputeRule,
        inputs: Sequence[torch.Tensor],
        loss_of: Callable[..., torch.Tensor],
    ) -> None:
        self._device = inputs[0].device
        give_parameters(model, rules, self._values)
        model.to(self._device)  # its buffers
        Recomputation(model, recompute, self._device)
        self._model, self._specs, self._inputs, self._loss_of = model, plan_units(model, rules), inputs, loss_of

    def _values(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        """Ones for the weights of norms and for biases, and normal values for matrices."""
        if len(shape) < 2:
            return torch.ones(shape, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, device=self._device).normal_(std=SPREAD)

    def step(self) -> tuple[list[Key], list[float]]:
        """The marks of one step, and the seconds before each of them and after the last."""
        with self._hooked() as (trace, begin_backward, end_graphs):
            trace.stamp()
            loss = self._loss_of(self._model, *self._inputs)
            begin_backward()
            loss.backward()
            end_graphs()
            del loss
            trace.stamp()
        return [(kind, unit) for _, kind, unit in trace.marks], trace.seconds()

    @contextmanager
    def _hooked(self) -> Iterator[tuple[StampedTrace, Callable[[], None], Callable[[], None]]]:
        trace = StampedTrace(self._device)
        marking = MarkingSchedule(trace)
        units = [MarkedUnit(spec, position, marking) for position, spec in enumerate(self._specs)]
        hooks = ModuleHooks(self._model, cast("list[Any]", units), cast("Any", marking))
        try:
            yield trace, marking.begin_backward, hooks.end_graphs
        finally:
            hooks.remove()


class StampedTrace(Trace):
    """A trace without storages, which keeps the time of each mark: on a GPU as an event in the current stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stamps: list[Stamp] = []

    def mark(self, kind: Mark, unit: int) -> None:
        before = len(self.marks)
        super().mark(kind, unit)
        if len(self.marks) > before:
            self.stamp()

    def stamp(self) -> None:
        """Keep this moment."""
        if self._device.type != "cuda":
            self._stamps.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._stamps.append(event)

    def seconds(self) -> list[float]:
        """The seconds between the moments that were kept; on a GPU this waits for the last of them."""
        last = self._stamps[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
            events = cast("list[torch.cuda.Event]", self._stamps)
            return [start.elapsed_time(stop) / 1e3 for start, stop in pairwise(events)]
        moments = cast("list[float]", self._stamps)
        return [stop - start for start, stop in pairwise(moments)]


def typical(steps: Sequence[tuple[list[Key], list[float]]]) -> SegmentTable[float]:
    """Seconds by segment of several steps, which follow one another as micro-batches do.

    They are the medians, and together the median of a step: the sum of medians is less, because something delays one
    segment or another of most steps.
    """
    marks = steps[0][0]
    assert all(found == marks for found, _ in steps), "the same step reported different marks"
    seconds = [statistics.median(values) for values in zip(*(s for _, s in steps), strict=True)]
    whole = statistics.median(sum(values) for _, values in steps)
    return SegmentTable.of(marks, [one * whole / sum(seconds) for one in seconds])
