"""Selective recomputation with offloaded products: one mode for the forward, one for the recomputation.

Like torch's own (create_selective_checkpoint_contexts), which keeps the products on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from zero_runtime.activations.offload import Frame, View

Operation = Callable[..., Any]


class KeepProducts(TorchDispatchMode):
    """Packs the results of `operations` in the order of their calls."""

    def __init__(self, operations: Collection[object], frame: Frame) -> None:
        super().__init__()
        self._operations, self._frame = operations, frame
        self.products: list[Any] = []

    def __torch_dispatch__(self, func: Operation, _types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._operations:
            self.products.append(tree_map(self._pack, result))
        return result

    def _pack(self, value: Any) -> Any:
        return self._frame.pack(value.detach()) if isinstance(value, torch.Tensor) else value


class GiveProducts(TorchDispatchMode):
    """Returns the packed results to the same calls in the same order, which then compute nothing."""

    def __init__(self, kept: KeepProducts, frame: Frame) -> None:
        super().__init__()
        self._kept, self._frame = kept, frame
        self._given = 0

    def __enter__(self) -> Any:
        self._given = 0  # a second backward through a retained graph starts over
        return super().__enter__()

    def __torch_dispatch__(self, func: Operation, _types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._kept._operations:
            return func(*args, **(kwargs or {}))
        self._given += 1
        return tree_map(self._unpack, self._kept.products[self._given - 1])

    def _unpack(self, value: Any) -> Any:
        return self._frame.unpack(value).detach() if isinstance(value, (View, torch.Tensor)) else value
