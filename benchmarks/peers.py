"""The same training step in FSDP2 and DeepSpeed, for comparison with the rows. DeepSpeed needs the `bench` extra."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist

from benchmarks.gpt import Gpt, GptSize, loss_of
from benchmarks.stages_task import PEERS

LR, WEIGHT_DECAY = 1e-4, 0.01
Batch = tuple[torch.Tensor, torch.Tensor]  # ids and labels, [micro, seq] each
Step = Callable[[Batch], float]  # a complete step, which returns this rank's share of the loss


def peers_here() -> tuple[str, ...]:
    """The peers that are installed."""
    return tuple(name for name in PEERS if find_spec(_module(name).partition(".")[0]))


def import_peer(name: str) -> None:
    """Imports a peer before a measurement begins, since imports do not count as memory of its training."""
    import_module(_module(name))


def _module(name: str) -> str:
    return "torch.distributed.fsdp" if name.startswith("fsdp2") else "deepspeed"


def peer_step(name: str, size: GptSize, precision: str, device: torch.device) -> Step:
    """A step of one of PEERS.

    FSDP2 and DeepSpeed divide gradients by the world size, so their loss is the mean over this rank's tokens.
    """
    torch.manual_seed(0)
    model = Gpt(size).to(device)
    if name.startswith("fsdp2"):
        return _fsdp2(model, precision, device, reshard=name.endswith("reshard"))
    return _deepspeed(model, precision, stage=int(name.split()[1]))


def _fsdp2(model: Gpt, precision: str, device: torch.device, *, reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(batch: Batch) -> float:
        loss = loss_of(model, *batch) / batch[1].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()) / dist.get_world_size()

    return step


def _deepspeed(model: Gpt, precision: str, *, stage: int) -> Step:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": model.size.micro,
        "gradient_clipping": 0.0,  # by default it clips at 1.0
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
    }
    deepspeed.init_distributed(dist_init_required=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: Batch) -> float:
        loss = loss_of(engine, *batch) / batch[1].numel()
        engine.backward(loss)
        engine.step()
        return float(loss.detach()) / dist.get_world_size()

    return step
