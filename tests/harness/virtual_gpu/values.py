"""Values for the tensors of the virtual GPU: every operation runs on the host too, on a twin of each device tensor.

A twin is a storage of the host with the bytes that the device's storage would have. Operations run when they are
issued, so the values are those of one right order; whether other orders are possible is what machine.py checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from harness.virtual_gpu.devices import Devices
from harness.virtual_gpu.recorder import ALLOCATIONS, METADATA, Recorder, Storages

CPU = torch.device("cpu")
# Operations that the host has no kernel for; their results are zeros.
WITHOUT_VALUES = frozenset(
    f"_scaled_dot_product_{kind}_attention{end}" for kind in ("flash", "efficient") for end in ("", "_backward")
)


class Twins(Storages):
    """The storages, and the twins of those of the device."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices)
        self._twins: dict[int, torch.UntypedStorage] = {}

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the twin: the same elements in the same layout. A tensor of the host is its own value."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        storage = self._twins[tensor.untyped_storage()._cdata]
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def adopt(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """`value` was computed for a device tensor; None: it has memory alone. A no-op if the tensor has a twin: the
        operation has written to it, or the tensor is a view."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._twins:
            return
        self.see(tensor)
        self._twins[storage._cdata] = _noise(storage.nbytes())
        if value is not None:
            self.value(tensor).copy_(value)

    def resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        if storage._cdata in self._twins:
            self._twins[storage._cdata] = _noise(size)
        return super().resize(storage, size)

    def _device_storage_went(self, key: int) -> None:
        self._twins.pop(key, None)
        super()._device_storage_went(key)


class ValueRecorder(Recorder):
    """The mode that records operations and computes their values."""

    storages: Twins

    def __init__(self, devices: Devices, storages: Twins | None = None) -> None:
        super().__init__(devices, storages or Twins(devices))

    def in_thread(self) -> ValueRecorder:
        return ValueRecorder(self.devices, self.storages)

    def _fake_result(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if name in METADATA and isinstance(args[0], FakeTensor):
            return super()._fake_result(func, name, args, kwargs, tensors)
        if name in WITHOUT_VALUES:
            result = super()._fake_result(func, name, args, kwargs, tensors)
            for tensor in _leaves(result):
                self.storages.adopt(tensor, torch.zeros((), dtype=tensor.dtype))
            return result
        given, named = tree_map(self._on_the_host, (list(args), kwargs))
        if name == "native_layer_norm_backward":  # the host's takes the statistics in the input's dtype
            given[3:5] = [one.to(given[1].dtype) for one in given[3:5]]
        computed = func(*given, **named)
        if any(isinstance(one, FakeTensor) for one in tensors):
            result = super()._fake_result(func, name, args, kwargs, tensors)
        else:  # a tensor of the host comes to the device, or one is made there
            with self._fake:
                result = torch.empty_strided(
                    computed.size(), computed.stride(), dtype=computed.dtype, device=kwargs["device"]
                )
        wanted, values = _leaves(result), _leaves(computed)
        if not any(isinstance(one, FakeTensor) for one in wanted):
            return args[0] if name == "copy_" else computed  # a copy to the host, or a number that it reads
        for tensor, value in zip(wanted, values, strict=True):
            if isinstance(tensor, FakeTensor):
                self.storages.adopt(tensor, None if name in ALLOCATIONS else value)
        return result

    def _on_the_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.storages.value(value)
        return CPU if isinstance(value, torch.device) else value


def _noise(nbytes: int) -> torch.UntypedStorage:
    """Memory that nothing has been written to: NaN in every floating-point format."""
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8).untyped_storage()


def _leaves(result: Any) -> list[torch.Tensor]:
    leaves = result if isinstance(result, (tuple, list)) else [result]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
