"""The contestants that take turns in benchmarks/stages.py: complete steps of every row, and parts of our rows alone.

[Note: equal states]
Every contestant begins from the same weights, takes the same step number on the same tokens, and has taken as many
steps before. So code that has to step a row in order to inspect it (how often it gathers, a gradient for its optimizer)
does that with a separate copy. Forward and backward alone keep the initial weights: they have no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpt import Gpt, draw_tokens, loss_of
from benchmarks.stages_task import LIMIT, ROWS, Task
from zero_runtime.collectives import Collectives
from zero_runtime.kernels import ops
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch

LR, WEIGHT_DECAY = 1e-4, 0.01
Batch = tuple[torch.Tensor, torch.Tensor]  # ids and labels, [micro, seq] each
Step = Callable[[Batch], float]  # a complete step, which returns this rank's share of the loss


def batch_of(task: Task, step: int, device: torch.device) -> Batch:
    """This rank's tokens of a step: different at every step and on every rank, the same for every contestant."""
    ids = draw_tokens(task.size, seed=step * task.world + dist.get_rank()).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def whole_step(name: str, task: Task, device: torch.device, watch: RankWatch) -> Step:
    """A complete step of LIMIT or of one of ROWS, from its initial weights."""
    if name == LIMIT:
        return limit_step(task, device)
    return row_step(make_runtime(ROWS[name], task, device, watch), task)


def limit_step(task: Task, device: torch.device) -> Step:
    torch.manual_seed(0)
    model = Gpt(task.size).to(device, half_or_not(task.precision))

    def step(batch: Batch) -> float:
        loss = loss_of(model, *batch) / task.tokens
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def row_step(runtime: ZeroRuntime, task: Task) -> Step:
    def step(batch: Batch) -> float:
        runtime.backward(loss_of(runtime.model, *batch) / task.tokens)
        loss = runtime.step(LR).loss / dist.get_world_size()
        for unit in runtime.units:  # work that the step started counts as its time, not the next one's
            unit.wait_current()
        return loss

    return step


def parts_alone(stage: int, task: Task, device: torch.device, watch: RankWatch) -> dict[str, Callable[[Batch], Any]]:
    """The row's collectives, its gradients' flat copies and its optimizer, each alone, on one copy of the row; see
    [Note: equal states]."""
    runtime = make_runtime(stage, task, device, watch)
    batch = batch_of(task, 0, device)
    return {
        "collectives": collectives_alone(runtime, row_step(runtime, task), batch),
        "gradients": gradients_alone(runtime),
        "optimizer": optimizer_alone(runtime, batch, task),
    }


def collectives_alone(runtime: ZeroRuntime, row: Step, batch: Batch) -> Callable[[Batch], None]:
    """The collectives of the row's step, one after another with nothing else running, in allocated buffers."""
    row(batch)
    runtime.reset_ledger()
    row(batch)
    sent = runtime.reset_ledger().data
    gathers = sent["all_gather"].calls // len(runtime.units) if "all_gather" in sent else 0
    alone = Collectives(runtime.plan.shard_count(dist.get_world_size()), runtime.clock)
    buffers = []
    for unit in runtime.units:
        full = torch.zeros(unit.layout.padded_numel, device=runtime.device)
        own = slice(*unit.layout.shard_range(alone.shard_rank))
        param = full.to(half_or_not(runtime.precision.param))
        buffers.append((param, param[own].clone(), full, full[own]))

    def step(_batch: Batch) -> None:
        for param, shard, grad, summed in buffers:
            for _ in range(gathers):
                alone.all_gather(param, shard).wait()
            alone.reduce(grad, summed).wait()

    return step


def gradients_alone(runtime: ZeroRuntime) -> Callable[[Batch], None]:
    """What a step does with gradients besides summing them over the ranks: each is copied into the unit's flat
    gradient, in its dtype, and the squares of this rank's part are added up for the norm."""
    units = []
    for unit in runtime.units:
        flat = torch.zeros(unit.layout.padded_numel, device=runtime.device)
        grads = [torch.zeros(one.numel, dtype=half_or_not(runtime.precision.param)) for one in unit.layout.segments]
        pairs = [(one.of(flat), grad.to(runtime.device)) for one, grad in zip(unit.layout.segments, grads, strict=True)]
        units.append((pairs, unit.layout.shard_of(flat, runtime.collectives.shard_rank)))

    def step(_batch: Batch) -> None:
        for pairs, own in units:
            for into, grad in pairs:
                into.copy_(grad)
            ops.sum_of_squares(own)

    return step


def optimizer_alone(runtime: ZeroRuntime, batch: Batch, task: Task) -> Callable[[Batch], None]:
    """The row's update of its shards, repeated from one gradient."""
    runtime.backward(loss_of(runtime.model, *batch) / task.tokens)
    unscaled = torch.ones((), device=runtime.device)
    return lambda _batch: runtime.optimizer.step(LR, unscaled)


def make_runtime(stage: int, task: Task, device: torch.device, watch: RankWatch) -> ZeroRuntime:
    torch.manual_seed(0)
    return ZeroRuntime(
        Gpt(task.size),
        ZeroPlan.from_stage(stage),
        MixedPrecision(task.precision),
        AdamWConfig(weight_decay=WEIGHT_DECAY, no_decay=False),
        RuntimeSettings(watch=watch),
        device,
    )


def half_or_not(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32
