"""Blocks whose activations are stored in host memory between forward and backward.

With `offload=cpu` the tensors that blocks keep are stored in host memory (offload.py). For a block that recomputes,
these are the inputs through which gradients flow (and its products, if it keeps them); for any other block, everything
that autograd saves in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from zero_runtime.activations.modes import GiveProducts, KeepProducts
from zero_runtime.activations.offload import Frame, HostMemory
from zero_runtime.activations.recompute import KEPT_OPERATIONS
from zero_runtime.offload.copy_streams import Copies, copies_for


class BlocksOnHost(HostMemory):
    """The host memory of a model's blocks, and the forwards that use it."""

    def forward_of(self, block: nn.Module, *, recomputes: bool, keeps_products: bool) -> KeptOnHost:
        """The forward that takes the place of the block's own."""
        if recomputes:
            return RecomputedFromHost(block, self, keeps_products=keeps_products)
        return KeptOnHost(block, self)


def open_memory(device: torch.device, copies: Copies | None) -> BlocksOnHost | None:
    """None if the device computes in host memory and no copies are given."""
    copies = copies or copies_for(device)
    return None if copies is None else BlocksOnHost(copies, device)


class KeptOnHost:
    """A block's forward whose activations are stored on the host."""

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
        # Masks and positions stay on the device, because blocks share them.
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
