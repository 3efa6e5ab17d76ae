"""A penalty on weights trains as in plain PyTorch, wherever the script builds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from harness.seed_loop import full_values, initialize_quietly, unequal
from torch import nn

from zero_runtime.errors import ParameterReadError

WORLD, LR = 2, 0.125


def batch_of(index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randint(-2, 3, (2, 4), generator=generator).float()


class Decayed(nn.Sequential):
    """Layers with a penalty on their weights, which the forward builds before or after them, or the script outside."""

    def __init__(self, place: str) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.place = place
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 2)

    def penalty(self) -> torch.Tensor:
        every = [one for layer in self if isinstance(layer, nn.Linear) for one in (layer.weight, layer.bias)]
        return sum((one.square().sum() for one in every), torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.penalty() if self.place == "before the layers" else 0.0
        x = super().forward(x).square().mean()
        return x + (self.penalty() if self.place == "after the layers" else before)


def decayed_loss(call: Any, model: Decayed, x: torch.Tensor) -> torch.Tensor:
    before = model.penalty() if model.place == "before the forward" else 0.0
    loss = call(x)
    return loss + (model.penalty() if model.place == "after the forward" else before)


def penalties() -> None:
    """Sums of small binary fractions, which are exact in any order: the weights have plain torch's bits."""
    for place in ("before the forward", "before the layers", "after the layers", "after the forward"):
        for micro_batches in (1, 2):
            batches = [[batch_of(index, rank) for rank in range(WORLD)] for index in range(micro_batches)]
            plain_model = Decayed(place)
            for x in (x for by_rank in batches for x in by_rank):
                (decayed_loss(plain_model, plain_model, x) / WORLD / micro_batches).backward()
            torch.optim.SGD(plain_model.parameters(), lr=LR).step()
            for stage in range(4):
                model = Decayed(place)
                config = {
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_accumulation_steps": micro_batches,
                    "gradient_clipping": 0.0,
                    "optimizer": {"type": "SGD", "params": {"lr": LR}},
                    "zero_optimization": {"stage": stage},
                }
                engine = initialize_quietly(model=model, model_parameters=model.parameters(), config=config)[0]
                if stage == 3 and "the forward" in place:
                    with pytest.raises(
                        ParameterReadError, match="to train through it, read it inside the model's forw"
                    ):
                        model.penalty()
                    engine.destroy()
                    continue
                for by_rank in batches:
                    engine.backward(decayed_loss(engine, model, by_rank[dist.get_rank()]))
                    engine.step()
                found = full_values(engine)
                engine.destroy()
                assert unequal(found, dict(plain_model.named_parameters())) == [], (place, micro_batches, stage)


def test_a_penalty_on_weights_trains_as_in_plain_torch_wherever_it_is_built() -> None:
    run_ranks(penalties, WORLD)
