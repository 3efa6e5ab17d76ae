"""Counts the activations of a configuration without running it. Needs torch, but no ranks and no device.

An answer is plain data: {"bytes": the fields of ActivationBytes}, or {"unknown": why they cannot be counted}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from orchestrator.config.schema import Device, RunConfig
from orchestrator.plan import memory_cache
from orchestrator.worker.setup import build_deferred
from orchestrator.workloads.models import token_losses
from zero_runtime.memory.activation_count import Trace, between
from zero_runtime.memory.activation_trace import trace_step
from zero_runtime.unit_planner import UnitRules

Answer = dict[str, Any]
REASON_LENGTH = 200
SMALLEST = 2  # torch treats a batch of one differently: dimensions of one count as contiguous and broadcast


def trace_of(config: RunConfig) -> Trace:
    """Traces one micro-batch with the configured model, precision, recomputation and loss."""
    model, _ = build_deferred(config)
    ids = torch.zeros((config.batch.micro, config.batch.seq), dtype=torch.int64)
    return trace_step(
        model,
        UnitRules(config.precision.mixed, keep_dtype=tuple(config.precision.keep_dtype)),
        config.recompute,
        [ids, ids.clone(), torch.ones((), dtype=torch.int64)],
        lambda built, ids, labels, tokens: token_losses(built, ids, labels, config.loss.tile_tokens) / tokens,
        on_cuda=config.resources.device is Device.cuda,
    )


def known(config: RunConfig) -> Answer:
    """The answer from the cache that predictions fill; otherwise counted here and added to the cache."""
    key = memory_cache.activations_key(config)
    answer: Answer | None = memory_cache.stored(key)
    if answer is None:
        answer = _counted(config, [])
        memory_cache.store(key, answer)
    return answer


def answers(family: Sequence[RunConfig]) -> Iterator[tuple[RunConfig, Answer]]:
    """Answers for configurations that differ only in the micro-batch. The smallest and the largest are counted; those
    between are interpolated if these two allow it (see `activation_count.between`)."""
    inner = sorted({config.batch.micro for config in family if config.batch.micro >= SMALLEST})[1:-1]
    ends: list[tuple[int, Trace]] = []
    for config in sorted(family, key=lambda config: (config.batch.micro in inner, config.batch.micro)):
        micro = config.batch.micro
        interpolated = between(ends[0], ends[-1], micro) if micro in inner and ends else None
        yield config, _counted(config, ends) if interpolated is None else {"bytes": asdict(interpolated)}


def _counted(config: RunConfig, ends: list[tuple[int, Trace]]) -> Answer:
    """Counts the activations, and adds the trace to `ends` if other micro-batches may be interpolated from it."""
    try:
        trace = trace_of(config)
    except Exception as error:  # a model's code may raise anything, and the run itself does not need this
        first = (str(error).strip().splitlines() or [""])[0]
        return {"unknown": f"{type(error).__name__}: {first[:REASON_LENGTH]}"}
    if config.batch.micro >= SMALLEST:
        ends.append((config.batch.micro, trace))
    return {"bytes": asdict(trace.total())}
