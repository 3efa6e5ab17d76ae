"""Activation checkpointing: which blocks rerun their forward in backward, what they keep, and where.

[Note: what is wrapped]
A block's `forward` is wrapped, not the block: the block's hooks then see one forward call and one backward, and the
recomputation inside is not a call for them. When a block recomputes, its unit has already been gathered, because the
gradient of the block's output has arrived; so recomputation gathers nothing more. Random states are restored for it, so
dropout draws the same numbers again.

[Note: what leaves]
With `offload=cpu` the tensors that blocks keep are stored in host memory (offload.py). For a block that recomputes,
these are the inputs through which gradients flow (and its products, if it keeps them); for any other block, everything
that autograd saves in it. Other keyword arguments of a recomputing block (masks, positions) stay on the device, because
blocks share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zero_runtime.activations.modes import GiveProducts, KeepProducts
from zero_runtime.activations.offload import Frame, HostMemory
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.errors import PlanError
from zero_runtime.offload.copy_streams import Copies, copies_for
from zero_runtime.unit_planner import block_modules

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
        copies: Copies | None = None,
    ) -> None:
        blocks = block_modules(model)
        if rule != RecomputeRule(every=rule.every) and not blocks:
            raise PlanError(
                f"recompute.kind={rule.kind}, offload={rule.offload}: expected a model with an nn.ModuleList of blocks "
                f"of one class, found none in {type(model).__name__}; use recompute=none without offload"
            )
        copies = (copies or copies_for(device)) if rule.offload == "cpu" else None
        self.memory = None if copies is None else HostMemory(copies, device)  # activations on the host
        self.blocks = rule.picks(blocks)
        self._wrapped: Sequence[nn.Module] = blocks if self.memory is not None else self.blocks
        keeps_products = rule.kind == "by_operation"
        for block in self._wrapped:
            # On the instance, where module.__call__ looks first; the class stays as it is.
            if self.memory is None:
                block.forward = Recomputed(block.forward, keeps_products=keeps_products)
            elif block in self.blocks:
                block.forward = RecomputedFromHost(block, self.memory, keeps_products=keeps_products)
            else:
                block.forward = KeptOnHost(block, self.memory)

    def remove(self) -> None:
        """Restore the blocks' own forward and release the host memory. Idempotent; only between two steps."""
        for block in self._wrapped:
            del block.forward
        self.blocks = self._wrapped = []
        if self.memory is not None:
            self.memory.close()


class KeptOnHost:
    """A block's forward whose activations are stored on the host. See [Note: what leaves]."""

    def __init__(self, block: nn.Module, memory: HostMemory) -> None:
        self._block, self._memory = block, memory
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        frame = self._memory.frame(self._block.parameters())
        try:
            with saved_tensors_hooks(frame.pack, frame.unpack):
                return self._run(frame, args, kwargs)
        finally:
            frame.end()

    def _run(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._forward(*args, **kwargs)


class RecomputedFromHost(KeptOnHost):
    """The same for a block that keeps its inputs (and its products with `keeps_products`) instead of its activations.

    The hooks around checkpoint see only its positional arguments, because it installs separate hooks inside.
    """

    def __init__(self, block: nn.Module, memory: HostMemory, *, keeps_products: bool) -> None:
        super().__init__(block, memory)
        self._keeps_products = keeps_products

    def _run(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flows = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor) and value.requires_grad}
        rest = {key: value for key, value in kwargs.items() if key not in flows}
        names = tuple(flows)

        def forward(*given: Any) -> Any:
            named = dict(zip(names, given, strict=False))
            return self._forward(*given[len(names) :], **named, **rest)

        settings: dict[str, Any] = {"use_reentrant": False}
        if self._keeps_products:
            keep = KeepProducts(KEPT_OPERATIONS, frame)
            settings["context_fn"] = lambda: (keep, GiveProducts(keep, frame))
        return checkpoint(forward, *flows.values(), *args, **settings)


class Recomputed:
    """A block's forward that keeps its inputs (and its products with `keeps_products`), not its activations."""

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
