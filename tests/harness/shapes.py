"""Models of unusual shapes: each takes ids [batch, tokens].

Each model's `forward(ids)` returns something from which `loss_of` makes a 0-dim tensor, so that any shape of output
can be tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCAB = 12, 17


class Layer(nn.Module):
    """A block with a residual path, like a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Base(nn.Module):
    """Embedding, blocks, norm and head; subclasses change one thing."""

    layer: type[nn.Module] = Layer

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(self.layer() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.norm(self.run_blocks(self.embed(ids))))

    def loss_of(self, output: Any) -> torch.Tensor:
        return output.float().logsumexp(-1).sum() - output.float()[..., 0].sum()


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Borrowed(Base):
    """The output multiplies by the embedding's weight without owning it; the embedding is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: torch.Tensor) -> Any:
        return F.linear(self.norm(self.run_blocks(self.embed(ids))), self.embed.weight)


class BorrowingHead(nn.Module):
    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = [source]  # a list hides a module from torch
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x * self.scale, self.source[0].weight)


class BorrowedInHead(Base):
    """The same inside a module, and two weights of another block besides, read before their owner runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = BorrowingHead(self.embed)

    def forward(self, ids: torch.Tensor) -> Any:
        early = self.blocks[2].down.bias * 2 + self.blocks[2].norm.weight
        return self.head(self.norm(self.run_blocks(self.embed(ids) + early)))


class HeldWeight(Base):
    """A weight kept in a plain list: a reference that torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.output = nn.Module()
        self.output.held = [self.embed.weight]

    def forward(self, ids: torch.Tensor) -> Any:
        weight = self.output.held[0]
        return F.linear(self.norm(self.run_blocks(self.embed(ids)) + weight.mean()), weight)


class SmallParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.one = nn.Parameter(torch.full((1,), 0.5))
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.one * self.scalar + self.empty.sum()


class Small(Base):
    """Parameters of 0 and 1 elements and of no dimension, in units of their own and in the root."""

    layer = SmallParts

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Linear(0, 3, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids) * self.temperature + self.nothing(torch.zeros(1, 1, 0)).sum()


class Repeated(Base):
    """Every block is used twice, the second time around after the others."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class Parallel(Base):
    """One block is used twice side by side, so its two backwards interleave."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[1](self.blocks[0](x)) + self.blocks[1](x * 0.5))


class Sometimes(Base):
    """The middle block takes part only where the first id is even; one parameter never does."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(5))
        self.blocks[0].extra = nn.Linear(3, 3)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.blocks[0](self.embed(ids))
        if int(ids[0, 0]) % 2 == 0:
            x = self.blocks[1](x)
        return self.head(self.norm(self.blocks[2](x)))


class Nested(Base):
    """Lists of lists, none of which is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Layer() for _ in range(2)) for _ in range(2))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.blocks:
            for block in stage:
                x = block(x)
        return x


@dataclass
class Pair:
    main: torch.Tensor
    aside: dict[str, Any]


class Shaped(nn.Module):
    """Takes keywords and returns a tuple of a dataclass, a dictionary and None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, main: torch.Tensor, extra: dict[str, torch.Tensor] | None = None) -> tuple[Any, ...]:
        side = self.side(main if extra is None else main + extra["side"])
        return Pair(self.inner(main), {"side": side, "nothing": None}), None


class Silent(nn.Module):
    """Returns nothing: what it computes goes into a list that it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> None:
        with torch.no_grad():
            into.append(self.seen(x).sum())


class Outputs(Base):
    """Several inputs and outputs, keywords, and modules that return every kind of thing."""

    layer = Shaped

    def __init__(self) -> None:
        super().__init__()
        self.silent = Silent()

    def forward(self, ids: torch.Tensor, *, offset: torch.Tensor | None = None) -> Any:
        x = self.embed(ids) if offset is None else self.embed(ids) + offset
        extra = None
        watched: list[torch.Tensor] = []
        for block in self.blocks:
            pair, _ = block(main=x, extra=extra)
            x, extra = pair.main, pair.aside
            assert self.silent(x, watched) is None
        return {"logits": self.head(self.norm(x)), "side": (extra["side"], watched)}

    def loss_of(self, output: Any) -> torch.Tensor:
        return super().loss_of(output["logits"]) + output["side"][0].square().sum()


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter; the weight's norm is computed aside from the input's path, as in DoRA."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer)
        self.base.requires_grad_(False)
        self.a = nn.Linear(inner, 2, bias=False)
        self.b = nn.Linear(2, outer, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight + self.b.weight @ self.a.weight
        return (self.base(x) + self.b(self.a(x))) / (1 + (self.base.weight * weight).square().mean())


class AdaptedLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up = Adapted(WIDTH, 2 * WIDTH)
        self.down = Adapted(2 * WIDTH, WIDTH)
        self.norm.requires_grad_(False)


class Adapters(Base):
    """A frozen model with trained adapters inside its blocks; embedding, norm and head are frozen units."""

    layer = AdaptedLayer

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.norm, self.head):
            part.requires_grad_(False)


class FrozenMiddle(Base):
    """A frozen block between trained ones: its gradient passes through and it has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class FrozenRepeated(Parallel):
    """A frozen block whose two backwards interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class Fp32Norms(Base):
    """A bf16 model that keeps its norms in fp32, and a buffer in fp64."""

    class Mixed(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
            return x + self.down(F.gelu(self.up(normed)))

    layer = Mixed

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
        self.register_buffer("table", torch.arange(3, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.run_blocks(self.embed(ids))
        return self.head(self.norm(x.float()).to(x.dtype)) + self.table.sum().to(x.dtype)


SHAPES: dict[str, type[Base]] = {
    kind.__name__: kind
    for kind in (
        *(Base, Tied, Borrowed, BorrowedInHead, HeldWeight, Small, Repeated, Parallel, Sometimes, Nested, Outputs),
        *(Adapters, FrozenMiddle, FrozenRepeated),
    )
}


def build_shape(kind: type[Base]) -> Base:
    """The model with weights that depend on its class alone; small ones, so that twenty steps stay finite."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


def ids_of(step: int, rank: int) -> torch.Tensor:
    """[2, 5] int64; the first id is even on some steps and ranks and odd on others."""
    ids = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    ids[0, 0] = step  # all ranks alike: ranks must use the same modules
    return ids
