"""Which activations blocks keep for backward, and where. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from zero_runtime.limits import Limits

RecomputeKind = Literal["none", "full", "every_nth", "by_operation"]
ActivationDevice = Literal["none", "cpu"]
Block = TypeVar("Block")


@dataclass(frozen=True)
class RecomputeRule:
    """Activation checkpointing.

    `kind`: full keeps only the input of each block and runs the block's forward again in backward, every_nth does the
    same for the last of every `every` blocks, and by_operation also keeps the outputs of attention and of matrix
    products; of products without a bias, every `products`-th alone, from the first (2 is torchtitan's list). `offload`:
    cpu stores the activations that the blocks keep in host memory until backward; on a CPU they are there already.
    """

    kind: RecomputeKind = "none"
    every: int = 2
    offload: ActivationDevice = "none"
    products: int = 1

    def __post_init__(self) -> None:
        limits = Limits.of(self, "recompute")
        for name, hint in (("kind", RecomputeKind), ("offload", ActivationDevice)):
            known = get_args(hint)
            limits.must(name, known.__contains__, f"one of {', '.join(known)}")
        limits.at_least(1, "every", "products")
        if self.products > 1 and self.offload != "none":
            rule = "recompute.offload=cpu keeps the outputs of all matrix products"
            limits.refuse(rule, f"recompute.products={self.products}", "recompute.products=1", "recompute.offload=none")
        limits.conclude()

    def picks(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """The blocks that recompute."""
        if self.kind == "none":
            return []
        every = self.every if self.kind == "every_nth" else 1
        return blocks[every - 1 :: every]
