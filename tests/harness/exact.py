"""A model whose training has the same bits in every order of summation, so that rows and devices can be compared.

Weights, inputs and rates are small multiples of powers of two, and each operation is a sum of products. As long as
every such sum, of absolute values, is at most 2^24 times the power of two that divides its terms, fp32 represents each
partial sum exactly. So neither cuBLAS's choice of an algorithm, nor NCCL's of a ring or a tree, nor a fused
multiply-add can change a bit, and any difference is a mistake: a read before a wait, a wrong offset, a lost term.
tests/parity/test_exact.py proves the condition for every operation of `plain`.

SGD shows each gradient in one step. Lion, whose updates are -lr, 0 or lr, stays exact for three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zero_runtime.offload_plan import OffloadPlan
from zero_runtime.optim.configs import LionConfig, OptimizerConfig, SgdConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.settings import NO_OFFLOAD
from zero_runtime.world import own_rank, world_size

SGD, LION = SgdConfig(), LionConfig(beta1=0.5, beta2=0.5)
STEPS: dict[OptimizerConfig, int] = {SGD: 1, LION: 3}
RATES: dict[OptimizerConfig, float] = {SGD: 2.0**-5, LION: 2.0**-2}
WIDTH, TOKENS = 8, 8
LOSS_SCALE = 2.0**-5  # gradients are then of the size of the weights


class ExactBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ExactModel(nn.Module):
    """[tokens, WIDTH] to [tokens, WIDTH]. Each weight is -1, 0 or 1, and about four of five are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExactBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                signs = torch.randint(-1, 2, param.shape, generator=generator)
                param.copy_(signs * (torch.rand(param.shape, generator=generator) < 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs(step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [TOKENS, WIDTH] of -1, 0 and 1, different for each step, rank and micro-batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 10 * rank + micro)
    x, y = torch.randint(-1, 2, (2, TOKENS, WIDTH), generator=generator).float()
    return x, y


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) * y).sum() * LOSS_SCALE


@dataclass(frozen=True)
class Row:
    """One way to train the model. Every row of one optimizer and `micro_batches` has the same curve."""

    stage: int
    optimizer: OptimizerConfig = LION
    shard_ranks: int | None = None
    micro_batches: int = 1
    prefetch: int = 1
    offload: OffloadPlan = NO_OFFLOAD


@dataclass(frozen=True)
class Curve:
    """The loss of each step, summed over the ranks, and the weights after the last step."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def same(one: Curve, other: Curve) -> bool:
    """Whether two curves have the same bits."""
    equal = (torch.equal(one.weights[name], value) for name, value in other.weights.items())
    return one.losses == other.losses and one.weights.keys() == other.weights.keys() and all(equal)


def plain(row: Row, world: int) -> Curve:
    """What `world` ranks must have, from one process of plain torch in fp64."""
    model = ExactModel().double()
    momenta = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    losses = []
    for step in range(STEPS[row.optimizer]):
        loss = 0.0
        for rank in range(world):
            for micro in range(row.micro_batches):
                part = loss_of(model, *(one.double() for one in inputs(step, rank, micro)))
                part.backward()
                loss += float(part.detach())
        losses.append(loss)
        with torch.no_grad():
            for name, param in model.named_parameters():
                assert param.grad is not None
                param -= RATES[row.optimizer] * _update(row.optimizer, param.grad, momenta[name])
        model.zero_grad()
    return Curve(losses, {name: param.detach().float() for name, param in model.named_parameters()})


def _update(optimizer: OptimizerConfig, grad: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
    if not isinstance(optimizer, LionConfig):
        return grad
    direction = (momentum + grad) / 2
    momentum.copy_(direction)  # both betas are 1/2
    return direction.sign()


def trained(
    row: Row,
    device: torch.device,
    make: Callable[[], nn.Module] = ExactModel,
    read_host: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist,
) -> Curve:
    """The curve of this rank's runtime, in a world that exists; every rank must call it. Ends the runtime."""
    settings = RuntimeSettings(
        micro_batches=row.micro_batches, prefetch=row.prefetch, offload=row.offload, read_host=read_host
    )
    plan = ZeroPlan.from_stage(row.stage, shard_ranks=row.shard_ranks)
    runtime = ZeroRuntime(make(), plan, MixedPrecision(), row.optimizer, settings, device)
    losses = []
    for step in range(STEPS[row.optimizer]):
        for micro in range(row.micro_batches):
            runtime.backward(loss_of(runtime.model, *(one.to(device) for one in inputs(step, own_rank(), micro))))
        losses.append(runtime.step(RATES[row.optimizer]).loss)
    with runtime.full_params() as values:
        weights = {name: value.detach().cpu().clone() for name, value in values.items()}
    runtime.close()
    return Curve(losses, weights)


def wrong_rows(rows: list[Row], device: torch.device) -> list[str]:
    """The rows that do not have the bits of `plain`, with the first difference; every rank must call it."""
    wrong = []
    for row in rows:
        found, wanted = trained(row, device), plain(row, world_size())
        if not same(found, wanted):
            names = [name for name, value in wanted.weights.items() if not torch.equal(found.weights[name], value)]
            wrong.append(f"{row}: losses {found.losses}, expected {wanted.losses}; weights that differ: {names}")
    return wrong


def rows_of(world: int) -> list[Row]:
    """Every stage with each optimizer; several micro-batches and prefetches; and hybrid sharding from four ranks."""
    rows = [Row(stage, optimizer) for stage in (0, 1, 2, 3) for optimizer in (SGD, LION)]
    rows += [Row(stage, micro_batches=3) for stage in (0, 1, 2, 3)]
    rows += [Row(3, prefetch=0), Row(3, prefetch=2)]
    return rows + (hybrid_rows(world) if world >= 4 and world % 2 == 0 else [])


def hybrid_rows(world: int) -> list[Row]:
    """Shards over half of the ranks, and two replicas of each."""
    return [Row(stage, shard_ranks=world // 2, micro_batches=micro) for stage in (1, 2, 3) for micro in (1, 2)]
