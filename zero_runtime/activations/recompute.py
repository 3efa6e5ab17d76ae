"""Activation checkpointing: which blocks rerun their forward in backward, what they keep, and where.

Random states are restored for a recomputation, so dropout draws the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.errors import PlanError
from zero_runtime.unit_planner import block_modules
from zero_runtime.wings import ACTIVATIONS_ON_HOST, load

CPU = torch.device("cpu")
_aten = torch.ops.aten
# Matrix products take most of a block's time, while their outputs take little of its memory.
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


class Recomputation:
    """Applies a rule to a model's blocks until `remove`. It changes time and memory, never bits.

    `device`: where the model will run. `copies`: the copies for offloading; None chooses them by device, and offloads
    nothing if the device computes in host memory. PlanError if the model has no repeated blocks to apply the rule to.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: RecomputeRule,
        device: torch.device = CPU,
        copies: Any = None,
    ) -> None:
        blocks = block_modules(model)
        if rule != RecomputeRule(every=rule.every) and not blocks:
            raise PlanError(
                f"recompute.kind={rule.kind}, offload={rule.offload}: expected a model with an nn.ModuleList of blocks "
                f"of one class, found none in {type(model).__name__}; use recompute=none without offload"
            )
        self.memory = load(ACTIVATIONS_ON_HOST)(device, copies) if rule.offload == "cpu" else None
        self.blocks = rule.picks(blocks)
        self._wrapped: Sequence[nn.Module] = blocks if self.memory is not None else self.blocks
        products = rule.products if rule.kind == "by_operation" else 0
        for block in self._wrapped:
            # The forward, not the block: its hooks see one forward call and one backward, and the recomputation inside
            # is not a call for them. The unit is there already, because the gradient of the block's output has arrived.
            # On the instance, where module.__call__ looks first; the class stays as it is.
            if self.memory is None:
                block.forward = Recomputed(block.forward, products=products)
            else:
                recomputes = block in self.blocks
                keeps = bool(products)
                block.forward = self.memory.forward_of(block, recomputes=recomputes, keeps_products=keeps)

    def remove(self) -> None:
        """Restore the blocks' own forward and release the host memory. Idempotent; only between two steps."""
        for block in self._wrapped:
            del block.forward
        self.blocks = self._wrapped = []
        if self.memory is not None:
            self.memory.close()


class Recomputed:
    """A block's forward that keeps its inputs (and every `products`-th product, if not 0), not its activations."""

    def __init__(self, forward: Callable[..., Any], *, products: int) -> None:
        self._forward = forward
        self._settings: dict[str, Any] = {"use_reentrant": False}
        if products:
            self._settings["context_fn"] = lambda: create_selective_checkpoint_contexts(_Kept(products))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(partial(self._forward, **kwargs), *args, **self._settings)


class _Kept:
    """The policy of one forward and its recomputation, which count the products apart."""

    def __init__(self, products: int) -> None:
        self._products, self._seen = products, {False: 0, True: 0}

    def __call__(self, context: Any, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        kept = operation in KEPT_OPERATIONS
        if operation == _aten.mm.default:
            kept = self._seen[context.is_recompute] % self._products == 0
            self._seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
