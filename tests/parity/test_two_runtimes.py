"""Two runtimes with one graph, a generator and its discriminator, have the bits of plain torch at every stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from harness.plain_optimizers import AdamW
from harness.ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

WIDTH, STEPS, WORLD = 6, 3, 2
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
# What the discriminator does with the gradients of the generator's loss: keeps them for its next step, drops them, or
# gets none, since it is frozen in between, also where its own step follows the generator's backward.
WAYS = ("kept", "dropped", "frozen")
Weights = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x)).tanh()


class Recomputed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()), nn.Sequential(Block(), Recomputed(), nn.Linear(WIDTH, 1))


def noise(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def critic_loss(generator: nn.Module, critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fake = generator(x)
    return critic(fake).mean() - critic(x * 0.5).mean()


def generator_loss(generator: nn.Module, critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return -critic(generator(x)).mean()


@contextmanager
def frozen(model: nn.Module, *, really: bool) -> Iterator[None]:
    model.requires_grad_(not really)
    yield
    model.requires_grad_(True)


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(list(model.parameters()), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def update(model: nn.Module, optimizer: AdamW, grads: list[list[torch.Tensor]]) -> None:
    """Update with the sum over the ranks, in their order."""
    for index, param in enumerate(model.parameters()):
        param.grad = sum((own[index] for own in grads[1:]), grads[0][index])
    optimizer.step()
    model.zero_grad()


def plain(way: str) -> Weights:
    generator, critic = pair()
    optimizers = optimizer_of(generator), optimizer_of(critic)
    left: list[list[torch.Tensor]] = []  # by rank: the gradients in the discriminator
    for step in range(STEPS):
        xs = [noise(step, rank) for rank in range(WORLD)]
        critics = [*critic.parameters()]
        own = [list(torch.autograd.grad(critic_loss(generator, critic, x) / WORLD, critics)) for x in xs]
        if left and way == "kept":
            own = [[a + b for a, b in zip(*grads, strict=True)] for grads in zip(left, own, strict=True)]
        if way != "frozen":
            update(critic, optimizers[1], own)
        every = [*generator.parameters(), *critics]
        found = [list(torch.autograd.grad(generator_loss(generator, critic, x) / WORLD, every)) for x in xs]
        if way == "frozen":
            update(critic, optimizers[1], own)
        size = len(every) - len(critics)
        left = [grads[size:] for grads in found]
        update(generator, optimizers[0], [grads[:size] for grads in found])
    return {name: param.detach() for name, param in nn.ModuleList((generator, critic)).named_parameters()}


def trained(way: str) -> dict[int, Weights]:
    """The weights by stage."""
    found = {}
    for stage in (0, 1, 2, 3):
        config = AdamWConfig(BETAS[0], BETAS[1], EPS, DECAY, no_decay=False)
        generator, critic = (
            ZeroRuntime(
                model,
                ZeroPlan.from_stage(stage),
                MixedPrecision(),
                config,
                RuntimeSettings(unit_numel=1),
                torch.device("cpu"),
            )
            for model in pair()
        )
        for step in range(STEPS):
            x = noise(step, dist.get_rank())
            if way == "dropped":
                critic.zero_grad()
            critic.backward(critic_loss(generator.model, critic.model, x) / WORLD)
            if way != "frozen":
                critic.step(LR)
            with frozen(critic.model, really=way == "frozen"):
                generator.backward(generator_loss(generator.model, critic.model, x) / WORLD)
            if way == "frozen":
                critic.step(LR)
            whole = [unit.name for unit in critic.units if unit.parameters.unsharded_param.untyped_storage().size()]
            assert stage < 3 or whole == [], "what joined a backward is released at its end"
            generator.step(LR)
        found[stage] = {}
        for index, runtime in enumerate((generator, critic)):
            with runtime.full_params() as values:
                found[stage] |= {f"{index}.{name}": value.clone() for name, value in values.items()}
            runtime.close()
    return found


@pytest.mark.filterwarnings("ignore:this plan holds up to")
@pytest.mark.parametrize("way", WAYS)
def test_a_generator_and_its_discriminator_have_the_bits_of_plain_torch(way: str) -> None:
    wanted = plain(way)
    for stage, found in run_ranks(trained, WORLD, way)[0].items():
        wrong = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
        assert not wrong, f"stage {stage}: {wrong}"
