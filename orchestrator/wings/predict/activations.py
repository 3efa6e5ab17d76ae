"""Counts the activations of a configuration without running it. Needs torch, but no ranks and no device.

An answer is plain data: {"bytes": the fields of ActivationBytes, "trace": the key of the trace}, or {"unknown": why
they cannot be counted}. The trace is {"linear": a LinearTrace, "work": the LinearWork of its segments}, both as plain
data, for the micro-batches from one to another. A failure that another try does not repeat, or that the machine's state
may explain, is "passing": another command asks again.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from orchestrator.config.parts import plain
from orchestrator.config.schema import Device, MeasureKind, RunConfig
from orchestrator.wings.kinds.classes import experts_in, zeros
from orchestrator.wings.kinds.kind import ROUTED, sample_of
from orchestrator.wings.predict import memory_cache
from orchestrator.wings.predict.sliced import divide, divide_sequences
from orchestrator.worker.setup import build_deferred, unit_rules
from orchestrator.workloads.models import token_losses
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.predict.memory.activation_count import LinearTrace, Trace
from zero_runtime.predict.memory.activation_trace import trace_step
from zero_runtime.predict.memory.short_model import FewerBlocks, Shortened, short_copy, treats_alike
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.predict.timing.work import LinearWork, Work
from zero_runtime.predict.timing.work_counter import WorkCounter
from zero_runtime.unit_planner import UnitRules

Answer = dict[str, Any]
Kept = TypeVar("Kept")
REASON_LENGTH = 200
TRIES = 3  # traces of one step, if modules are imported in the middle of it
NO_BACKWARD = "an evaluation keeps no activations for a backward, and the peak of a forward is not predicted"
SMALLEST = 2  # torch treats a batch of one differently: dimensions of one count as contiguous and broadcast


class TracedStep(NamedTuple):
    """A step of the configured model, or of the same model with few blocks, which `left` describes: its storages, and
    the work of its segments."""

    trace: Trace
    work: SegmentTable[Work]
    left: Shortened | None

    def completed(self, linear: LinearTrace) -> LinearTrace | None:
        """The trace of all blocks from that of these; None if it does not determine that."""
        return linear if self.left is None else self.left.complete(linear)

    @property
    def work_of_all(self) -> SegmentTable[Work]:
        return self.work if self.left is None else self.left.complete_table(self.work)


def _traced_step(config: RunConfig, *, whole: bool) -> TracedStep:
    """Of blocks that repeat only a few are traced, unless `whole` is asked for."""
    rules = unit_rules(config, built(config))
    short = None if whole else _shortened(config, rules)
    for _ in range(TRIES):
        imported = len(sys.modules)
        # Tracing uses a model up, and copying one takes a fraction of the time of building it.
        model = copy.deepcopy(built(config) if short is None else short.model)
        trace, work = _counted(config, model, rules)
        if len(sys.modules) == imported:
            break  # else tensors that a module made when it was imported may be in the trace
    return TracedStep(trace, work, None if short is None else short.left)


def built(config: RunConfig) -> nn.Module:
    """The model on the meta device, built once; frozen for an evaluation.

    It must not be changed; that of one configuration is kept.
    """
    frozen = config.measure.kind is MeasureKind.eval

    def make() -> nn.Module:
        model, _ = build_deferred(config)
        return model.requires_grad_(False) if frozen else model

    return _kept("model", (_settings(config), frozen), make)


_last: dict[str, tuple[object, Any]] = {}  # by name, what was made last, with the settings that it was made from


def _kept(name: str, settings: object, make: Callable[[], Kept]) -> Kept:
    """What was made for these settings; it is made if the last one was for others."""
    if name not in _last or _last[name][0] != settings:
        _last.pop(name, None)  # first, so that there are never two large ones
        _last[name] = settings, make()
    made: Kept = _last[name][1]
    return made


def _settings(config: RunConfig) -> str:
    """All that `build_deferred` reads."""
    changes = [config.data.packing, config.precision.keep_dtype, config.precision.compute]
    return json.dumps([plain(config.model), plain(config.adapter), changes], sort_keys=True)


def _shortened(config: RunConfig, rules: UnitRules) -> FewerBlocks | None:
    """The model with fewer blocks, which all rules of recomputation share that treat its blocks alike; None: it has to
    be traced as a whole."""

    settings = _settings(config), rules, treats_alike(config.recompute)
    return _kept("shorter model", settings, lambda: short_copy(built(config), rules, config.recompute))


def shorten_once(config: RunConfig) -> None:
    """Builds and shortens the configuration's model for all traces to come. A problem of it is left to them."""
    with suppress(Exception):
        _shortened(config, unit_rules(config, built(config)))


def _counted(config: RunConfig, model: nn.Module, rules: UnitRules) -> tuple[Trace, SegmentTable[Work]]:
    ids, labels = zeros(sample_of(config), config.batch.micro)
    head, sequence, work = divide(config, model), divide_sequences(config, model), WorkCounter()
    tile, autocast = config.loss.tile_tokens, memory_cache.autocast_of(config)
    trace = trace_step(
        model,
        rules,
        config.recompute,
        [ids, labels, torch.ones((), dtype=torch.int64)],
        lambda built, ids, labels, tokens: token_losses(built, ids, labels, tile, head, sequence) / tokens,
        on_cuda=config.resources.device is Device.cuda,
        observe=work,
        autocast=None if autocast is None else TORCH_DTYPE[autocast],
    )
    return trace, work.table(trace)


def known(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    """The answer and its trace by key, from the cache that predictions fill; otherwise counted here and added to it."""
    question = memory_cache.Question.of([config])
    found = question.read()
    if not found:
        found = dict(answers([config]))
        question.keep(found)
    return found


def answers(family: Sequence[RunConfig]) -> Iterator[tuple[str, Answer]]:
    """Answers by key for configurations that differ only in the micro-batch, and the traces that they name.

    The smallest and the largest are traced. Those between are interpolated where these two allow it (see
    `LinearTrace`), else from the traces of some sizes between.
    """
    if why := NO_BACKWARD if family[0].measure.kind is MeasureKind.eval else routed(family[0]):
        yield from ((memory_cache.activations_key(config), {"unknown": why}) for config in family)
        return
    by_micro = {config.batch.micro: config for config in family}
    several = sorted(micro for micro in by_micro if micro >= SMALLEST)
    left, tracing = set(by_micro), Tracing(family[0])
    for linear, work in tracing.linears(several[0], several[-1]) if len(several) > 1 else ():
        inside = [micro for micro in several if linear.low <= micro <= linear.high and micro in left]
        left -= set(inside)
        yield from _told(linear, work, family, [by_micro[micro] for micro in inside])
    for micro in sorted(left):
        found = tracing.one(micro)
        if isinstance(found, tuple):
            yield from _told(*found, family, [by_micro[micro]])
        else:
            yield memory_cache.activations_key(by_micro[micro]), found


Linear = tuple[LinearTrace, LinearWork]


def routed(config: RunConfig) -> str:
    """Why the activations of a mixture of experts are not counted; empty for all other models."""
    with suppress(Exception):  # of a model that cannot be built, which the trace will say
        if found := experts_in(built(config), config.model.model_type, config.model.config):
            return f"{found}: {ROUTED}"
    return ""


class Tracing:
    """The steps of one family that have been traced. MOST bounds their number. whole: trace all blocks, of many equal
    ones too: see zero_runtime.predict.memory.repeated_blocks."""

    MOST = 16  # enough to halve a thousand sizes down to two neighbours

    def __init__(self, config: RunConfig, *, whole: bool = False) -> None:
        self._config, self._whole = config, whole
        self._found: dict[int, TracedStep | Answer] = {}

    def _at(self, micro: int) -> TracedStep | Answer:
        """The traced step, or why there is none."""
        if micro not in self._found:
            found = self._try(micro)
            if isinstance(found, dict):  # once more: a reason that is not found again is none of the model's
                again = self._try(micro)
                found = found if again == found else _passing(again)
            self._found[micro] = found
        return self._found[micro]

    def _try(self, micro: int) -> TracedStep | Answer:
        config = replace(self._config, batch=replace(self._config.batch, micro=micro))
        try:
            return _traced_step(config, whole=self._whole)
        except Exception as error:  # a model's code may raise anything, and the run itself does not need this
            first = (str(error).strip().splitlines() or [""])[0]
            reason: Answer = {"unknown": f"{type(error).__name__}: {first[:REASON_LENGTH]}"}
            return _passing(reason) if isinstance(error, (MemoryError, OSError)) else reason

    def one(self, micro: int) -> Linear | Answer:
        """The trace of one size, or why there is none."""
        step = self._at(micro)
        if not isinstance(step, TracedStep):
            return step
        linear = step.completed(LinearTrace.of_one(micro, step.trace))
        if linear is None:
            self._trace_whole()
            return self.one(micro)
        work = step.work_of_all
        return linear, LinearWork(micro, micro, work, work)

    def linears(self, low: int, high: int) -> Iterator[Linear]:
        """Linear traces between two sizes, halved where one does not cover both ends, as around the size from which the
        loss has several tiles."""
        small, large = self._at(low), self._at(high)
        if not (isinstance(small, TracedStep) and isinstance(large, TracedStep)):
            return
        linear = LinearTrace.between((low, small.trace), (high, large.trace))
        if linear is not None:
            completed = small.completed(linear)
            if completed is not None:
                yield completed, LinearWork(low, high, small.work_of_all, large.work_of_all)
            else:
                self._trace_whole()
                yield from self.linears(low, high)
        elif high - low > 1 and len(self._found) < self.MOST:
            middle = (low + high) // 2
            yield from self.linears(low, middle)
            yield from self.linears(middle, high)

    def _trace_whole(self) -> None:
        """Five blocks do not determine the trace of all: trace all of them from now on."""
        assert not self._whole
        self._whole = True
        self._found.clear()


def _passing(found: TracedStep | Answer) -> TracedStep | Answer:
    return {**found, "passing": True} if isinstance(found, dict) else found


def _told(
    linear: LinearTrace, work: LinearWork, family: Sequence[RunConfig], configs: Sequence[RunConfig]
) -> Iterator[tuple[str, Answer]]:
    """The answers of those of the family that this trace covers; the trace comes before them."""
    place = memory_cache.trace_key(family, linear.low, linear.high)
    yield place, {"linear": linear.plain(), "work": work.plain()}
    for config in configs:
        counted = asdict(linear.at(config.batch.micro).total())
        yield memory_cache.activations_key(config), {"bytes": counted, "trace": place}
