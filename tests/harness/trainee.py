"""Runs a case of the oracle on ranks: functions for `run_ranks`, whose results are compared with the oracle's."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from harness.models import IGNORED, TinyTransformer, batch, token_loss_sum
from harness.oracle import ADAMW, LR, Case, Trace
from zero_runtime.optim.configs import OptimizerConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime


def plan_of(case: Case, stage: int) -> ZeroPlan:
    if stage == 0:
        return ZeroPlan.from_stage(0)
    outer = case.outer_sharding if stage == 3 else None
    return ZeroPlan.from_stage(stage, shard_ranks=case.shard_ranks, outer_sharding=outer)


def build_runtime(
    case: Case,
    stage: int,
    *,
    prefetch: int = 1,
    optimizer: OptimizerConfig = ADAMW,
    unit_numel: int | None = None,
) -> ZeroRuntime:
    return ZeroRuntime(
        TinyTransformer(case.model),
        plan_of(case, stage),
        case.precision,
        optimizer,
        RuntimeSettings(
            micro_batches=case.micro_batches,
            clip_norm=case.clip_norm,
            prefetch=prefetch,
            loss_scale=case.loss_scale,
            unit_numel=unit_numel,
        ),
        torch.device("cpu"),
    )


def backwards_of_step(runtime: ZeroRuntime, case: Case, step: int) -> None:
    """Forward and backward of all micro-batches of this rank's step, without the update."""
    rank = dist.get_rank()
    batches = [batch(case.model, step, rank, micro) for micro in range(case.micro_batches)]
    tokens = runtime.sum_over_ranks(sum(int((labels != IGNORED).sum()) for _, labels in batches))
    for index, (ids, labels) in enumerate(batches):
        keeps = case.no_sync and index < len(batches) - 1
        with runtime.no_sync() if keeps else nullcontext():
            runtime.backward(token_loss_sum(runtime.model, ids, labels) / tokens)


def train(
    case: Case,
    stages: tuple[int, ...] = (0, 1, 2, 3),
    prefetch: int = 1,
    optimizer: OptimizerConfig = ADAMW,
) -> dict[int, Trace]:
    """Run the case at each stage in turn. Full weights and first gradients are joined by `full_tensors`."""
    traces = {}
    for stage in stages:
        runtime = build_runtime(case, stage, prefetch=prefetch, optimizer=optimizer)
        before: dict[str, torch.Tensor] = {}
        trace = Trace([], [], {})
        for step in range(case.steps):
            backwards_of_step(runtime, case, step)
            if step == 0:
                trace.first_grads = full_tensors(runtime, "grad_shard")
                before = full_tensors(runtime, "master_shard")
            report = runtime.step(LR)
            if step == 0:
                after = full_tensors(runtime, "master_shard")
                trace.first_update = {name: after[name] - before[name] for name in after}
            trace.losses.append(report.loss)
            trace.norms.append(report.grad_norm)
            trace.scales.append(report.loss_scale)
            trace.skipped.append(report.skipped)
        trace.weights = full_tensors(runtime, "master_shard")
        traces[stage] = trace
    return traces


def full_tensors(runtime: ZeroRuntime, attribute: str) -> dict[str, torch.Tensor]:
    """Join the shards of every unit without the runtime's own gather. Returns tensors by name, in parameter shapes."""
    found = {}
    owners: list[int] = [0] * dist.get_world_size()  # the shard of each rank; of replicas, the first counts
    dist.all_gather_object(owners, runtime.collectives.shard_rank)
    for unit in runtime.units:
        shard = getattr(unit, attribute)
        if shard is None:
            continue
        full = shard
        if runtime.collectives.shard_count > 1:
            pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, shard.contiguous())
            full = torch.cat([pieces[owners.index(one)] for one in range(runtime.collectives.shard_count)])
        for segment in unit.layout.segments:
            values = full[segment.offset : segment.offset + segment.numel]
            found[segment.name] = values.reshape(segment.shape).clone()
    return found
