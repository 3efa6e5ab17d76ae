"""Creates the checkpoints of tests/foreign/deepspeed with DeepSpeed: `python tests/foreign/make_deepspeed.py OUT`.

Needs the extra `bench` and starts two ranks over gloo on the CPU. For each of stages 1 to 3: bf16 with fp32 masters,
two groups of parameters, one frozen and one tied parameter, three steps of AdamW. Next to each checkpoint it writes
`expected.safetensors`: every parameter's master, and in stage 3 its moments, as DeepSpeed itself reassembles them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORLD, STEPS = 2, 3
# Widths that differ from each other: a piece that is read from the wrong place cannot look right.
VOCAB, WIDTH, INNER = 13, 6, 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.frozen = nn.Linear(INNER, INNER, bias=False).requires_grad_(False)
        self.down = nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.arange(WIDTH, dtype=torch.float32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.shift.to(self.embed.weight.dtype)
        return self.head(x + self.down(self.frozen(torch.tanh(self.up(x)))))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for name, param in trained if param.dim() <= 1], "weight_decay": 0.0},
    ]


def make(rank: int, out: str, stage: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(29600 + stage),
        DS_ACCELERATOR="cpu",
    )
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(11)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        ids = (torch.arange(10).view(2, 5) * (step + 2) + rank) % VOCAB
        loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(out, tag=f"global_step{STEPS}")
    expected = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            from deepspeed import zero

            with zero.GatheredParameters([param]) if stage == 3 else torch.no_grad():
                expected[f"master/{name}"] = param.detach().float().clone()
            continue
        expected[f"master/{name}"] = safe_get_full_fp32_param(param).clone()
        for state in ("exp_avg", "exp_avg_sq") if stage == 3 else ():  # per parameter only in stage 3
            expected[f"{state}/{name}"] = safe_get_full_optimizer_state(param, state).clone()
    if rank == 0:
        save_file({key: value.contiguous().view(-1) for key, value in expected.items()}, f"{out}/expected.safetensors")
    dist.barrier()
    engine.destroy()


def main() -> None:
    root = Path(sys.argv[1])
    for stage in (1, 2, 3):
        out = root / f"stage{stage}"
        out.mkdir(parents=True)
        mp.spawn(make, args=(str(out), stage), nprocs=WORLD)


if __name__ == "__main__":
    main()
