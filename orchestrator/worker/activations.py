"""The activations of a configuration, counted without running it; needs torch, but neither ranks nor a device.

An answer is plain data: {"bytes": the fields of ActivationBytes}, or {"unknown": why they cannot be counted}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from orchestrator.config.schema import Device, RunConfig
from orchestrator.plan import memory_cache
from orchestrator.worker.setup import build_deferred, build_precision
from orchestrator.workloads.models import token_losses
from zero_runtime.activations.recompute import RecomputeRule
from zero_runtime.memory.activation_count import Trace, between
from zero_runtime.memory.activation_trace import trace_step
from zero_runtime.unit_planner import UnitRules

Answer = dict[str, Any]
REASON_LENGTH = 200
SMALLEST = 2  # a batch of one is a case of its own: torch takes dimensions of one for contiguous, and broadcasts them


def trace_of(config: RunConfig) -> Trace:
    """One micro-batch of the configured model, precision, recomputation and loss."""
    model, _ = build_deferred(config)
    ids = torch.zeros((config.batch.micro, config.batch.seq), dtype=torch.int64)
    return trace_step(
        model,
        UnitRules(build_precision(config.precision), keep_dtype=tuple(config.precision.keep_dtype)),
        RecomputeRule(str(config.recompute.kind), config.recompute.every, str(config.recompute.offload)),
        [ids, ids.clone(), torch.ones((), dtype=torch.int64)],
        lambda built, ids, labels, tokens: token_losses(built, ids, labels, config.loss.tile_tokens) / tokens,
        on_cuda=config.resources.device is Device.cuda,
    )


def known(config: RunConfig) -> Answer:
    """From the cache that predictions fill, or counted here and added to it."""
    key = memory_cache.activations_key(config)
    found: Answer | None = memory_cache.stored(key)
    if found is None:
        found = _counted(config, [])
        memory_cache.store(key, found)
    return found


def answers(family: Sequence[RunConfig]) -> Iterator[tuple[RunConfig, Answer]]:
    """Of configurations that differ in the micro-batch alone: the smallest and the largest are counted, and those
    between are worked out where these two allow it (see `activation_bytes.between`)."""
    inner = sorted({one.batch.micro for one in family if one.batch.micro >= SMALLEST})[1:-1]
    ends: list[tuple[int, Trace]] = []
    for config in sorted(family, key=lambda one: (one.batch.micro in inner, one.batch.micro)):
        micro = config.batch.micro
        found = between(ends[0], ends[-1], micro) if micro in inner and ends else None
        yield config, _counted(config, ends) if found is None else {"bytes": asdict(found)}


def _counted(config: RunConfig, ends: list[tuple[int, Trace]]) -> Answer:
    """By counting; what may be an end of a row of micro-batches is added to them."""
    try:
        trace = trace_of(config)
    except Exception as error:  # whatever a model's code may raise: the run itself does not need this
        first = (str(error).strip().splitlines() or [""])[0]
        return {"unknown": f"{type(error).__name__}: {first[:REASON_LENGTH]}"}
    if config.batch.micro >= SMALLEST:
        ends.append((config.batch.micro, trace))
    return {"bytes": asdict(trace.total())}
