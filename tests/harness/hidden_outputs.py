"""Models whose results are where a search of a call's output does not find them.

Objects of the model's own, attributes, closures and generators; with and without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.shapes import WIDTH, Base, Layer


class Carrier:
    """A plain class, in which torch does not look for tensors either."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class CarryingLayer(Layer):
    """Takes and returns a Carrier, and multiplies by a parameter of its own and by one that a child owns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, carrier: Any) -> Any:
        return Carrier(super().forward(carrier.x * self.scale) * self.up.bias.mean())


class Carried(Base):
    """Blocks and the model itself return objects of their own."""

    layer = CarryingLayer

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        carrier = Carrier(x)
        for block in self.blocks:
            carrier = block(carrier)
        return carrier.x

    def forward(self, ids: torch.Tensor) -> Any:
        return Carrier(super().forward(ids))

    def loss_of(self, output: Any) -> torch.Tensor:
        return super().loss_of(output.x)


class PlainCarryingLayer(Layer):
    """All of its parameters belong to its children."""

    def forward(self, carrier: Any) -> Any:
        return Carrier(super().forward(carrier.x))


class CarriedByOwners(Carried):
    layer = PlainCarryingLayer


class CarriedFrozen(CarriedByOwners):
    """A frozen block between trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class CarriedCheckpointed(Carried):
    """Blocks that return objects recompute; the objects pass through torch's checkpoint."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        carrier = Carrier(x)
        for block in self.blocks:
            carrier = checkpoint(block, carrier, use_reentrant=False)
        return carrier.x


class CarriedReentrant(Carried):
    """The same inside a backward of their own."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: block(Carrier(y)).x, x, use_reentrant=True)
        return x


class Remembering(Base):
    """Each block leaves a tensor on itself, computed after its output, and the model leaves its logits."""

    class Noting(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            self.aside = self.gate(x).logsumexp(-1)
            return x

    layer = Noting

    def forward(self, ids: torch.Tensor) -> Any:
        self.logits = super().forward(ids)

    def loss_of(self, output: Any) -> torch.Tensor:
        return super().loss_of(self.logits) + sum(block.aside.sum() for block in self.blocks)


class OneSided(Base):
    """On rank 0 alone, each block notes a norm that has a graph, after its output."""

    class Noting(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if dist.is_initialized() and dist.get_rank() == 0:
                self.noted = x.norm()
            return x

    layer = Noting


class OneSidedAgain(OneSided):
    """The first block notes nothing, and is called once more after the last one."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(blocks)
        self.blocks[0] = Layer()

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](super().run_blocks(x))


class Changing(Base):
    """The blocks return a tensor in some steps and an object in the others."""

    class Sometimes(Layer):
        carries = False

        def forward(self, x: torch.Tensor) -> Any:
            x = super().forward(x)
            return Carrier(x) if self.carries else x

    layer = Sometimes

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            block.carries = int(ids[0, 0]) % 2 == 1
            x = block(x)
            x = x.x if block.carries else x
        return self.head(self.norm(x))


class Unused(Base):
    """The loss needs what the model leaves on itself; what it returns has no gradient, as where features are taken."""

    def forward(self, ids: torch.Tensor) -> Any:
        self.features = self.norm(self.run_blocks(self.embed(ids)))
        return self.head(self.features)

    def loss_of(self, output: Any) -> torch.Tensor:
        return super().loss_of(self.features)


class Featured(Base):
    """The loss needs what hooks took from inside two blocks, one of them frozen; the model's output is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.taken: list[torch.Tensor] = []
        for block in self.blocks[:2]:
            block.down.register_forward_hook(lambda _module, _args, output: self.taken.append(output))

    def forward(self, ids: torch.Tensor) -> Any:
        self.taken.clear()
        return super().forward(ids)

    def loss_of(self, output: Any) -> torch.Tensor:
        return sum((one.square().sum() for one in self.taken), torch.zeros(()))


class Yielding(Base):
    """The blocks and the model are generators, whose code runs after their calls have returned."""

    class Layer(Layer):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
            x = self.norm(x)
            yield x
            yield x + self.down(self.up(x).tanh())

    layer = Layer

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            first, x = block(x)
            yield first
        yield self.head(self.norm(x))

    def loss_of(self, output: Any) -> torch.Tensor:
        *parts, logits = output
        return super().loss_of(logits) + sum(part.square().sum() for part in parts)


class YieldingInside(Yielding):
    """Generators inside a model that returns a tensor; they multiply by parameters of their own."""

    class Layer(Yielding.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
            first, last = super().forward(x)
            yield first
            yield last * self.scale

    layer = Layer

    def forward(self, ids: torch.Tensor) -> Any:
        parts = list(super().forward(ids))
        return parts[-1] + sum(part.square().mean() for part in parts[:-1])

    def loss_of(self, output: Any) -> torch.Tensor:
        return Base.loss_of(self, output)


class Closing(Base):
    """The model returns a function that computes the logits."""

    def forward(self, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        x = self.run_blocks(self.embed(ids))
        return lambda: self.head(self.norm(x))

    def loss_of(self, output: Any) -> torch.Tensor:
        return super().loss_of(output())


HIDDEN: dict[str, type[Base]] = {
    kind.__name__: kind
    for kind in (
        *(Carried, CarriedByOwners, CarriedFrozen, CarriedCheckpointed, CarriedReentrant),
        *(Remembering, OneSided, OneSidedAgain, Changing, Unused, Featured, Yielding, YieldingInside, Closing),
    )
}
