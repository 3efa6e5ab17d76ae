"""Activation checkpointing: which blocks run their forward again in backward, and what they keep until then.

[Note: what is wrapped]
A block's `forward` is wrapped, not the block: the block's hooks then see one call in forward and one backward, and the
recomputation inside is no call at all. Its unit has been gathered by then, since the gradient of the block's output has
come, so recomputing gathers nothing more. Random states are put back for it, so dropout draws what it drew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zero_runtime.errors import PlanError
from zero_runtime.unit_planner import block_modules

KINDS = ("none", "full", "every_nth", "by_operation")

_aten = torch.ops.aten
# Matrix products cost most of a block's time and their outputs little of its memory beside all the rest.
KEPT_OPERATIONS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


@dataclass(frozen=True)
class RecomputeRule:
    """full: every block keeps its input alone. every_nth: so do the last of every `every` blocks, the others keep all.
    by_operation: every block keeps its input and the outputs of KEPT_OPERATIONS, and recomputes the rest.
    """

    kind: str = "none"
    every: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"recompute.kind: expected one of {', '.join(KINDS)}, found {self.kind!r}")
        if self.every < 1:
            raise PlanError(f"recompute.every: expected at least 1, found {self.every}")

    def picks(self, blocks: list[nn.Module]) -> list[nn.Module]:
        """The blocks that recompute."""
        if self.kind == "none":
            return []
        every = self.every if self.kind == "every_nth" else 1
        return blocks[every - 1 :: every]


class Recomputation:
    """A model's blocks under a rule, until `remove`. It changes time and memory, never bits.

    PlanError when the model has no repeated blocks to apply the rule to.
    """

    def __init__(self, model: nn.Module, rule: RecomputeRule) -> None:
        blocks = block_modules(model)
        if rule.kind != "none" and not blocks:
            raise PlanError(
                f"recompute.kind={rule.kind}: expected a model with an nn.ModuleList of blocks of one class, found "
                f"none in {type(model).__name__}; use recompute=none"
            )
        self.blocks = rule.picks(blocks)
        for block in self.blocks:
            # On the instance, where module.__call__ looks first; the class stays as it is.
            block.forward = Recomputed(block.forward, keeps_products=rule.kind == "by_operation")

    def remove(self) -> None:
        """Give the blocks their own forward back. Idempotent."""
        for block in self.blocks:
            del block.forward
        self.blocks = []


class Recomputed:
    """A block's forward that keeps its inputs (and the products, if so asked) in place of its activations."""

    def __init__(self, forward: Callable[..., Any], *, keeps_products: bool) -> None:
        self._forward = forward
        self._settings: dict[str, Any] = {"use_reentrant": False}
        if keeps_products:
            self._settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(partial(self._forward, **kwargs), *args, **self._settings)


def _policy(_context: object, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
