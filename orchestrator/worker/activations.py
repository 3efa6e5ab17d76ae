"""Counts the activations of a configuration without running it. Needs torch, but no ranks and no device.

An answer is plain data: {"bytes": the fields of ActivationBytes, "trace": the key of the trace}, or {"unknown": why
they cannot be counted}. A trace is a LinearTrace as plain data, for all micro-batches from the smallest to the largest
that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from orchestrator.config.schema import Device, RunConfig
from orchestrator.plan import memory_cache
from orchestrator.worker.setup import build_deferred
from orchestrator.workloads.models import token_losses
from zero_runtime.memory.activation_count import LinearTrace, Trace
from zero_runtime.memory.activation_trace import trace_step
from zero_runtime.memory.repeated_blocks import with_blocks
from zero_runtime.memory.short_model import shorten
from zero_runtime.unit_planner import UnitRules

Answer = dict[str, Any]
REASON_LENGTH = 200
SMALLEST = 2  # torch treats a batch of one differently: dimensions of one count as contiguous and broadcast


def trace_of(config: RunConfig, *, whole: bool = False) -> Trace:
    """Traces one micro-batch with the configured model, precision, recomputation and loss.

    Of many equal blocks five are traced, unless `whole` is asked for: see zero_runtime/memory/repeated_blocks.py.
    """
    model, _ = build_deferred(config)
    rules = UnitRules(config.precision.mixed, config.zero.unit_numel, tuple(config.precision.keep_dtype))
    short = None if whole else shorten(model, rules, config.recompute)
    if short is not None:
        trace = with_blocks(_trace(config, model, rules), short.units, short.blocks)
        if trace is not None:
            return trace
    if not whole:
        model, _ = build_deferred(config)  # the tracing has used it up, or it has lost blocks
    return _trace(config, model, rules)


def _trace(config: RunConfig, model: nn.Module, rules: UnitRules) -> Trace:
    ids = torch.zeros((config.batch.micro, config.batch.seq), dtype=torch.int64)
    return trace_step(
        model,
        rules,
        config.recompute,
        [ids, ids.clone(), torch.ones((), dtype=torch.int64)],
        lambda built, ids, labels, tokens: token_losses(built, ids, labels, config.loss.tile_tokens) / tokens,
        on_cuda=config.resources.device is Device.cuda,
    )


def known(config: RunConfig) -> Answer:
    """The answer from the cache that predictions fill; otherwise counted here and added to the cache."""
    key = memory_cache.activations_key(config)
    answer: Answer | None = memory_cache.stored(key)
    if answer is not None:
        return answer
    counted = dict(answers([config]))
    for found, one in counted.items():
        memory_cache.store(found, one)
    return counted[key]


def answers(family: Sequence[RunConfig]) -> Iterator[tuple[str, Answer]]:
    """Answers by key for configurations that differ only in the micro-batch, and the traces that they name.

    The smallest and the largest are traced; those between are interpolated if these two allow it (see `LinearTrace`).
    """
    by_micro = {config.batch.micro: config for config in family}
    several = sorted(micro for micro in by_micro if micro >= SMALLEST)
    left = set(by_micro)
    if len(several) > 1:
        traces = [_traced(by_micro[micro]) for micro in (several[0], several[-1])]
        if isinstance(traces[0], Trace) and isinstance(traces[1], Trace):
            linear = LinearTrace.between((several[0], traces[0]), (several[-1], traces[1]))
            if linear is not None:
                left -= set(several)
                yield from _told(linear, [by_micro[micro] for micro in several])
    for micro in sorted(left):
        trace = _traced(by_micro[micro])
        if isinstance(trace, Trace):
            yield from _told(LinearTrace.of_one(micro, trace), [by_micro[micro]])
        else:
            yield memory_cache.activations_key(by_micro[micro]), trace


def _told(linear: LinearTrace, configs: Sequence[RunConfig]) -> Iterator[tuple[str, Answer]]:
    place = memory_cache.trace_key(configs[0], linear.low, linear.high)
    yield place, linear.plain()
    for config in configs:
        counted = asdict(linear.at(config.batch.micro).total())
        yield memory_cache.activations_key(config), {"bytes": counted, "trace": place}


def _traced(config: RunConfig) -> Trace | Answer:
    """The trace, or why there is none."""
    try:
        return trace_of(config)
    except Exception as error:  # a model's code may raise anything, and the run itself does not need this
        first = (str(error).strip().splitlines() or [""])[0]
        return {"unknown": f"{type(error).__name__}: {first[:REASON_LENGTH]}"}
