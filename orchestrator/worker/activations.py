"""Counts the activations of a configuration without running it. Needs torch, but no ranks and no device.

An answer is plain data: {"bytes": the fields of ActivationBytes, "trace": the key of the trace}, or {"unknown": why
they cannot be counted}. A trace is a LinearTrace as plain data, for all micro-batches from the smallest to the largest
that were asked for. Beside each trace is the work of its segments, a LinearWork as plain data.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from orchestrator.config.schema import Device, RunConfig, to_dict
from orchestrator.plan import memory_cache
from orchestrator.worker.setup import build_deferred, unit_rules
from orchestrator.workloads.models import token_losses
from zero_runtime.memory.activation_count import LinearTrace, Trace
from zero_runtime.memory.activation_trace import trace_step
from zero_runtime.memory.repeated_blocks import with_blocks
from zero_runtime.memory.short_model import shorten
from zero_runtime.timing.segments import SegmentTable
from zero_runtime.timing.work import LinearWork, Work
from zero_runtime.timing.work_counter import WorkCounter
from zero_runtime.unit_planner import UnitRules

Answer = dict[str, Any]
_last_built: dict[str, nn.Module] = {}  # the last model, by its settings
REASON_LENGTH = 200
SMALLEST = 2  # torch treats a batch of one differently: dimensions of one count as contiguous and broadcast


class CountedStep(NamedTuple):
    """The storages of one micro-batch, and the work of its segments."""

    trace: Trace
    work: SegmentTable[Work]


def trace_of(config: RunConfig, *, whole: bool = False) -> Trace:
    """Traces one micro-batch with the configured model, precision, recomputation and loss."""
    return counted_step(config, whole=whole).trace


def counted_step(config: RunConfig, *, whole: bool = False) -> CountedStep:
    """Traces one micro-batch and counts its work.

    Of many equal blocks five are traced, unless `whole` is asked for: see zero_runtime/memory/repeated_blocks.py.
    """
    model = _built(config)
    rules = unit_rules(config)
    short = None if whole else shorten(model, rules, config.recompute)
    if short is not None:
        counted = _counted(config, model, rules)
        trace = with_blocks(counted.trace, short.units, short.blocks)
        if trace is not None:
            return CountedStep(trace, counted.work.with_blocks(short.units, short.blocks))
    if not whole:
        model = _built(config)  # the tracing has used it up, or it has lost blocks
    return _counted(config, model, rules)


def _built(config: RunConfig) -> nn.Module:
    """A model of one's own on the meta device: a copy, which takes a fraction of the time of building it."""
    key = json.dumps({name: to_dict(config)[name] for name in ("model", "adapter")}, sort_keys=True)
    if key not in _last_built:
        _last_built.clear()
        _last_built[key] = build_deferred(config)[0]
    return copy.deepcopy(_last_built[key])


def _counted(config: RunConfig, model: nn.Module, rules: UnitRules) -> CountedStep:
    ids = torch.zeros((config.batch.micro, config.batch.seq), dtype=torch.int64)
    work = WorkCounter()
    trace = trace_step(
        model,
        rules,
        config.recompute,
        [ids, ids.clone(), torch.ones((), dtype=torch.int64)],
        lambda built, ids, labels, tokens: token_losses(built, ids, labels, config.loss.tile_tokens) / tokens,
        on_cuda=config.resources.device is Device.cuda,
        observe=work,
    )
    return CountedStep(trace, work.table(trace))


def known(config: RunConfig) -> dict[str, Answer]:
    """The answer and its trace by key, from the cache that predictions fill; otherwise counted here and added to it."""
    key = memory_cache.activations_key(config)
    if key in (found := memory_cache.stored_answers([key])):
        return found
    counted = dict(answers([config]))
    for name, one in counted.items():
        memory_cache.store(name, one)
    return counted


def answers(family: Sequence[RunConfig]) -> Iterator[tuple[str, Answer]]:
    """Answers by key for configurations that differ only in the micro-batch, and the traces that they name.

    The smallest and the largest are traced. Those between are interpolated where these two allow it (see
    `LinearTrace`), else from the traces of some sizes between.
    """
    by_micro = {config.batch.micro: config for config in family}
    several = sorted(micro for micro in by_micro if micro >= SMALLEST)
    left, tracing = set(by_micro), _Tracing(family[0])
    for linear in tracing.linears(several[0], several[-1]) if len(several) > 1 else ():
        inside = [micro for micro in several if linear.low <= micro <= linear.high and micro in left]
        left -= set(inside)
        yield from _told(linear, tracing.work(linear), family[0], [by_micro[micro] for micro in inside])
    for micro in sorted(left):
        counted, config = _traced(by_micro[micro]), by_micro[micro]
        if isinstance(counted, CountedStep):
            linear, work = LinearTrace.of_one(micro, counted.trace), counted.work
            yield from _told(linear, LinearWork(micro, micro, work, work), config, [config])
        else:
            yield memory_cache.activations_key(config), counted


class _Tracing:
    """The steps of one family that have been traced. MOST bounds their number."""

    MOST = 10

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._found: dict[int, CountedStep | Answer] = {}

    def _at(self, micro: int) -> CountedStep | Answer:
        if micro not in self._found:
            self._found[micro] = _traced(replace(self._config, batch=replace(self._config.batch, micro=micro)))
        return self._found[micro]

    def linears(self, low: int, high: int) -> Iterator[LinearTrace]:
        """Linear traces between two sizes, halved where one does not cover both ends, as around the size from which the
        loss has several tiles."""
        small, large = self._at(low), self._at(high)
        if not (isinstance(small, CountedStep) and isinstance(large, CountedStep)):
            return
        linear = LinearTrace.between((low, small.trace), (high, large.trace))
        if linear is not None:
            yield linear
        elif high - low > 1 and len(self._found) < self.MOST:
            middle = (low + high) // 2
            yield from self.linears(low, middle)
            yield from self.linears(middle, high)

    def work(self, linear: LinearTrace) -> LinearWork:
        """The work of a linear trace."""
        small, large = self._at(linear.low), self._at(linear.high)
        assert isinstance(small, CountedStep)
        assert isinstance(large, CountedStep)
        return LinearWork(linear.low, linear.high, small.work, large.work)


def _told(
    linear: LinearTrace, work: LinearWork, of: RunConfig, configs: Sequence[RunConfig]
) -> Iterator[tuple[str, Answer]]:
    place = memory_cache.trace_key(of, linear.low, linear.high)
    yield place, linear.plain()
    yield memory_cache.work_key(of, linear.low, linear.high), work.plain()
    for config in configs:
        counted = asdict(linear.at(config.batch.micro).total())
        yield memory_cache.activations_key(config), {"bytes": counted, "trace": place}


def _traced(config: RunConfig) -> CountedStep | Answer:
    """The traced step, or why there is none."""
    try:
        return counted_step(config)
    except Exception as error:  # a model's code may raise anything, and the run itself does not need this
        first = (str(error).strip().splitlines() or [""])[0]
        return {"unknown": f"{type(error).__name__}: {first[:REASON_LENGTH]}"}
