"""Models of unusual shapes for the parity tests. Each takes ids [batch, tokens].

Each model's `forward(ids)` returns any kind of output, from which `loss_of` computes a 0-dim tensor.
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
    """The output multiplies by the embedding's weight without owning it; the embedding is a separate unit."""

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
    """Like Borrowed, but inside a module. Also reads two weights of a block before that block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = BorrowingHead(self.embed)

    def forward(self, ids: torch.Tensor) -> Any:
        early = self.blocks[2].down.bias * 2 + self.blocks[2].norm.weight
        return self.head(self.norm(self.run_blocks(self.embed(ids) + early)))


class HeldWeight(Base):
    """A weight kept in a plain list: a reference that torch does not track."""

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
    """Parameters with 0 elements, 1 element and no dimension, in separate units and in the root."""

    layer = SmallParts

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Linear(0, 3, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids) * self.temperature + self.nothing(torch.zeros(1, 1, 0)).sum()


class Repeated(Base):
    """All blocks run in order, and then all run once more."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class Parallel(Base):
    """One block is used twice side by side, so its two backwards interleave."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[1](self.blocks[0](x)) + self.blocks[1](x * 0.5))


class Sometimes(Base):
    """The middle block runs only if the first id is even; a parameter and a submodule are never used."""

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
    """Blocks in lists of lists; the lists themselves are never called."""

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
    """Returns None and appends its result to a list argument."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> None:
        with torch.no_grad():
            into.append(self.seen(x).sum())


class Outputs(Base):
    """Several inputs and outputs, keywords, and modules that return many kinds of objects."""

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
    """A linear layer with a low-rank adapter; the weight's norm is computed outside the input's path, as in DoRA."""

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
    """A frozen block between trained ones: gradients pass through it, and its parameters get none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class FrozenRepeated(Parallel):
    """A frozen block whose two backwards interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class LeafInputs(Base):
    """The blocks run on leaves that require a gradient, as in adversarial training: one block on a leaf alone, one on a
    leaf and on another block's output, one twice."""

    class Scaled(Layer):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    layer = Scaled

    def forward(self, ids: torch.Tensor) -> Any:
        leaf = (ids[..., None] / VOCAB).expand(*ids.shape, WIDTH).clone().requires_grad_()
        x = self.blocks[1](self.blocks[0](leaf), leaf)
        return self.head(self.norm(self.blocks[2](x) + self.blocks[2](leaf) + self.embed(ids)))


class FrozenFirst(Base):
    """Frozen embedding and first block; a hook lets the embedding's output require a gradient, as for adapters."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.blocks[0]):
            part.requires_grad_(False)
        self.embed.register_forward_hook(lambda _module, _args, output: output.requires_grad_())


class Penalty(Base):
    """A gradient penalty: the loss includes gradients of a leaf and of the embedded ids, through the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        logits = self.head(self.norm(self.run_blocks(x)))
        if not torch.is_grad_enabled():
            return logits, ()
        leaf = x.detach().requires_grad_()
        score = self.head(self.run_blocks(leaf)).square().mean()
        slopes = (
            *torch.autograd.grad(score, leaf, create_graph=True),
            *torch.autograd.grad(logits.square().mean(), x, create_graph=True),
        )
        with torch.no_grad():
            self.run_blocks(x)  # a forward that keeps no units gathered
        return logits, slopes

    def loss_of(self, output: Any) -> torch.Tensor:
        logits, slopes = output
        return super().loss_of(logits) + sum(((slope.norm() - 1).square() for slope in slopes), torch.zeros(()))


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
        *(Adapters, FrozenMiddle, FrozenRepeated, LeafInputs, FrozenFirst, Penalty),
    )
}


def build_shape(kind: type[Base]) -> Base:
    """The model with weights that depend only on its class, small enough that twenty steps stay finite."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


def ids_of(step: int, rank: int) -> torch.Tensor:
    """[2, 5] int64; the first id is the step, so it is even in some steps and odd in others."""
    ids = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    ids[0, 0] = step  # the same on all ranks, since ranks must use the same modules
    return ids
