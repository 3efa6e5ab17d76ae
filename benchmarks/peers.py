"""The same training step in FSDP2 and DeepSpeed, to stand beside the rows. Needs the `bench` extra for the latter."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.distributed as dist
from gpt import Gpt, GptSize, loss_of

LR, WEIGHT_DECAY = 1e-4, 0.01
Batch = tuple[torch.Tensor, torch.Tensor]
# Which row of ours a peer's setting is to be compared with.
PEERS = {"fsdp2": 2, "fsdp2 reshard": 3} | {f"deepspeed {stage}": stage for stage in range(4)}


def peers_here() -> dict[str, int]:
    """The peers that are installed, with the stage of each."""
    return {name: stage for name, stage in PEERS.items() if name.startswith("fsdp2") or find_spec("deepspeed")}


def peer_step(name: str, size: GptSize, precision: str, device: torch.device, batch: Batch) -> Callable[[], float]:
    """A step of one of PEERS, which returns this rank's share of the loss; both divide gradients by the world, so
    the loss that they get is multiplied by it."""
    torch.manual_seed(0)
    model = Gpt(size).to(device)
    scale = dist.get_world_size() / (batch[1].numel() * dist.get_world_size())
    if name.startswith("fsdp2"):
        return _fsdp2(model, precision, batch, scale, reshard=name.endswith("reshard"))
    return _deepspeed(model, precision, batch, scale, stage=int(name.split()[1]))


def _fsdp2(model: Gpt, precision: str, batch: Batch, scale: float, *, reshard: bool) -> Callable[[], float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(batch[0].device.type, (dist.get_world_size(),))
    half = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> float:
        loss = loss_of(model, *batch) * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()) / dist.get_world_size()

    return step


def _deepspeed(model: Gpt, precision: str, batch: Batch, scale: float, *, stage: int) -> Callable[[], float]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": len(batch[0]),
        "gradient_clipping": 0.0,  # it clips at 1.0 unless told
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
    }
    deepspeed.init_distributed(dist_init_required=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> float:
        loss = loss_of(engine, *batch) * scale
        engine.backward(loss)
        engine.step()
        return float(loss.detach()) / dist.get_world_size()

    return step
