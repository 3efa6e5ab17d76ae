"""Writes a point as a Python file for FSDP2: which modules are sharded, in which dtypes, and how a step is made."""

from __future__ import annotations

from orchestrator.config.schema import RunConfig
from orchestrator.wings.foreign import loop_lines
from zero_runtime.offload_plan import Tier
from zero_runtime.wire import EXACT

_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_FILE = '''"""{why}

Call shard(model) in every rank before the optimizer is made, and train_step for each step. Needs torch alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

MICRO_BATCH, ACCUMULATION, CLIP_NORM = {micro}, {accumulation}, {clip!r}


def blocks(model):
    """The modules of the first list of modules with more than one entry: a transformer's layers."""
    return next((list(one) for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 1), [])


def shard(model):
    """Shards the model in place, block by block, and returns it. The process group must be there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = {mesh}
    policy = MixedPrecisionPolicy(param_dtype={param}, reduce_dtype={reduce})
    offload = {offload}
    for module in [*blocks(model), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward={reshard}, mp_policy=policy, offload_policy=offload)
    return model

{groups}

def optimizer(model):
    return {optimizer}

{rates}

def train_step(model, optimizer, micro_batches, loss_of):
    """One update from ACCUMULATION micro-batches; loss_of(model, batch) is the mean over this rank's micro-batch."""
    total = 0.0
    for index, batch in enumerate(micro_batches):
        model.set_requires_gradient_sync({sync})
        loss = loss_of(model, batch) / len(micro_batches)
        loss.backward()
        total += loss.item()
    if CLIP_NORM is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total
'''


def problems_of(config: RunConfig) -> list[str]:
    """Why FSDP2 cannot run this point, one line each."""
    found = []
    dtypes = config.precision.dtypes
    if config.parallel.sp > 1:
        found.append("parallel.sp: the written script has no sequence parallelism      fix: parallel.sp=1")
    if config.parallel.tp > 1:
        found.append("parallel.tp: the written script has no tensor parallelism      fix: parallel.tp=1")
    if config.zero.stage == 0:
        found.append("zero=stage0: FSDP2 shards; use DistributedDataParallel      fix: zero=stage1, or --to deepspeed")
    if dtypes.param == "fp16":
        found.append("precision=fp16: FSDP2 has no loss scale      fix: precision=bf16, or --to deepspeed")
    if dtypes.master != "fp32":
        found.append("precision=bf16_pure: cast the model itself and use fp32 policies      fix: precision=bf16")
    if Tier.NVME in (config.offload.params, config.offload.optimizer):
        found.append("offload on a disk: FSDP2 has none      fix: offload=optimizer_param_cpu, or --to deepspeed")
    if config.zero.outer_sharding is not None:
        found.append(
            f"zero.outer_sharding={config.zero.outer_sharding}: FSDP2 replicates what its groups hold      fix: "
            "zero.outer_sharding=null"
        )
    if config.zero.wire != EXACT:
        exact = "zero.gather_dtype=null zero.reduce_dtype=null zero.error_feedback=false"
        found.append(f"quantised messages: FSDP2 sends exact ones      fix: {exact}")
    if not loop_lines.optimizer_line(config):
        found.append(f"optimizer={config.optimizer.rule.kind}: torch.optim has none      fix: optimizer=adamw")
    return found


def notes_of(config: RunConfig) -> list[str]:
    """What FSDP2 does differently, one sentence each."""
    notes = []
    if config.zero.stage == 1:
        notes.append("stage 1: gradients are reduced at the last micro-batch, and parameters stay gathered in a step")
    if Tier.HOST in (config.offload.params, config.offload.optimizer):
        notes.append("CPUOffloadPolicy keeps parameters, gradients and optimizer states in host memory, all of them")
    if config.optimizer.rule.kind == "adamw":
        notes.append("the states are those of torch.optim, in fp32, as here")
    if config.recompute.kind != "none":
        notes.append(f"recompute={config.recompute.kind}: wrap the blocks with torch.utils.checkpoint before shard")
    return notes


def fsdp2_file(config: RunConfig, why: str) -> str:
    """The content of the file."""
    dtypes, stage = config.precision.dtypes, config.zero.stage
    shards = config.zero.shard_ranks
    mesh = "init_device_mesh(device, (dist.get_world_size(),))"
    if shards is not None:
        mesh = (
            f'init_device_mesh(device, (dist.get_world_size() // {shards}, {shards}), mesh_dim_names=("copy", "shard"))'
        )
    offloads = Tier.HOST in (config.offload.params, config.offload.optimizer)
    return _FILE.format(
        why=why,
        micro=config.batch.micro,
        accumulation=config.batch.accumulation,
        clip=config.optimizer.clip_norm,
        mesh=mesh,
        param=_DTYPES[dtypes.param],
        reduce=_DTYPES[dtypes.reduce],
        offload='CPUOffloadPolicy(pin_memory=device == "cuda")' if offloads else "OffloadPolicy()",
        reshard=stage == 3,
        groups=loop_lines.parameter_groups(config),
        optimizer=loop_lines.optimizer_line(config),
        rates=loop_lines.rates(config),
        sync="index + 1 == len(micro_batches)" if stage == 1 or config.zero.reduce_at_boundary else "True",
    )
