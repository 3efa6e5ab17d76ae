"""A small model and its configuration, for tests of the drop-in engine on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 6
CLIP = 0.25  # below the norm of every gradient here, so that an update shows whether a new gradient's norm was used
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def at_level(number: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": number},
        **more,
    }


class Small(nn.Module):
    """A frozen and two trained layers, of a number of elements that no number of ranks divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH + 1)
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.frozen(x)).tanh() + self.shift.to(x.dtype))


def mean_loss(model: Any, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return 9 * model(torch.randn(4, WIDTH, generator=generator)).square().mean()


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
