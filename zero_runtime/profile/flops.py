"""Counts the operations of a step by module while it runs.

[Note: model operations]
Counted are matrix products, convolutions and attention kernels, by torch's formulas; a multiplication and an addition
are two. A causal kernel counts half of the scores. Operations of the model are those of its forward and of its backward
without what is computed a second time. Repeated are a forward that runs inside backward (gradients are enabled only
there), and what a module's backward computes beyond twice its forward: each product has at most two gradients of the
same cost, so the rest is a product that was computed before, as in attention kernels and in the tiled loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from zero_runtime.predict.timing.work_counter import product_of
from zero_runtime.profile.ranges import StepRanges

COUNTED_PHASES = ("forward", "backward")


@dataclass
class ModuleFlops:
    """Operations of one module in a step, without those of the modules in it. executed: all that ran."""

    forward: int = 0
    recompute: int = 0
    backward: int = 0

    @property
    def executed(self) -> int:
        return self.forward + self.recompute + self.backward

    @property
    def model(self) -> int:
        """Without what was computed a second time; see [Note: model operations]."""
        return self.forward + min(self.backward, 2 * self.forward)


class FlopsByModule(TorchDispatchMode):
    """Context inside `ranges` that counts by module; None is what runs outside of all modules, as the loss does.

    Operations of other phases than forward and backward are left out: an optimizer's products are no work of the model.
    """

    def __init__(self, ranges: StepRanges) -> None:
        super().__init__()
        self.by_module: dict[str | None, ModuleFlops] = {}
        self._ranges = ranges

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        product = product_of(func, args, kwargs or {}, result)
        if product is not None and product.flops:
            self._add(product.flops)
        return result

    def _add(self, flops: int) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            if self._ranges.phase in COUNTED_PHASES:
                self._of(self._ranges.module).forward += flops
        elif torch.is_grad_enabled():
            self._of(self._ranges.module or self._made_by(node)).recompute += flops
        else:
            self._of(self._made_by(node)).backward += flops

    def _made_by(self, node: Any) -> str | None:
        number: Callable[[], int] = node._sequence_nr
        return self._ranges.module_of(number())

    def _of(self, module: str | None) -> ModuleFlops:
        return self.by_module.setdefault(module, ModuleFlops())
