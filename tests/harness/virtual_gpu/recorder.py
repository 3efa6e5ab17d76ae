"""Records every operation: what it reads and writes, on which stream or thread, and whether the host waits for it.

Device tensors are fake: they have shapes, dtypes and storages, and no values. Host tensors are real, so that file I/O
and updates on the host run. A copy from the device gives ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

from harness.virtual_gpu.devices import Devices
from harness.virtual_gpu.machine import Range, place

# Operations that launch nothing: they allocate, or change a tensor and not its memory.
ALLOCATIONS = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
METADATA = frozenset(
    {"set_", "resize_", "resize_as_", "as_strided_", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_"}
    | {"record_grad_output_stream"}  # FSDP2's since torch 2.15: nothing on CUDA
)
# Operations whose result depends on values of the device: the host waits for them.
READS = frozenset({"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2"})


class Recorder(TorchDispatchMode):
    """The mode of one thread; all threads share the devices and the storages."""

    def __init__(self, devices: Devices, storages: Storages | None = None) -> None:
        super().__init__()
        self.devices = devices
        self.storages = storages or Storages(devices)
        self._fake = self.storages.fake

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every call, for compiled programs alone

    def in_thread(self) -> Recorder:
        """The mode of another thread."""
        return Recorder(self.devices, self.storages)

    def __torch_dispatch__(self, func: Any, _types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # Tensor.device
            return args[0].fake_device
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
            return self.storages.lock(func(*args, **kwargs))
        tensors = _tensors((args, kwargs))
        device = kwargs.get("device")
        on_device = device is not None and torch.device(device).type == "cuda"
        if not on_device and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._on_host(func, args, kwargs, tensors)
        namespace, name = func._schema.name.split("::")
        assert namespace != "c10d", f"{func._schema.name}: a collective that nccl.py does not have"
        result = self._fake_result(func, name, args, kwargs, tensors)
        self._on_device(func, name, args, kwargs, result)
        return result

    # ---- the host's own operations -----------------------------------------------------------------------------------

    def _on_host(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        result = func(*args, **kwargs)
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return result
        reads, writes = self._accesses(func, args, kwargs, result)
        if writes:
            self.devices.machine.act(self.devices.thread, func._schema.name, reads, writes)
        elif reads and not self._is_view(tensors, result):
            self.devices.machine.act(self.devices.thread, func._schema.name, reads)
        return result

    @staticmethod
    def _is_view(tensors: list[torch.Tensor], result: Any) -> bool:
        own = {_key(tensor) for tensor in tensors}
        results = _tensors(result)
        return bool(results) and all(_key(tensor) in own for tensor in results)

    # ---- operations of the device ------------------------------------------------------------------------------------

    def _fake_result(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if name == "_local_scalar_dense":
            return torch.ones((), dtype=tensors[0].dtype).item()
        if name == "equal":
            return True
        if name == "copy_" and tensors[0].device != tensors[1].device:
            return args[0]
        if name == "_to_copy" and torch.device(kwargs.get("device") or tensors[0].device).type == "cpu":
            return torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        # The next three give what fake tensors give, in a tenth of the time.
        if not func._schema.returns:
            return None
        if name.endswith("_") and isinstance(args[0], FakeTensor):
            if name in METADATA:
                with in_kernel_invocation_manager(self._fake):
                    func(*args, **kwargs)
            return args[0]
        if func.is_view and isinstance(args[0], FakeTensor):
            with in_kernel_invocation_manager(self._fake):
                view = func(*args, **kwargs)
            return [self._wrap(part) for part in view] if isinstance(view, (list, tuple)) else self._wrap(view)
        with self._fake:
            return func(*args, **kwargs)

    def _wrap(self, view: torch.Tensor) -> FakeTensor:
        return FakeTensor(self._fake, view, torch.device("cuda", self.devices.index))

    def _on_device(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        devices, machine = self.devices, self.devices.machine
        if func.is_view or name in METADATA:
            return
        given = _tensors((args, kwargs))
        results = _tensors(result)
        for tensor in results:
            self.storages.see(tensor)
        reads, writes = self._accesses(func, args, kwargs, result)
        if name in ALLOCATIONS or (not writes and self._is_view(given, result)):
            return
        index = next(tensor.device.index for tensor in (*given, *results) if tensor.device.type == "cuda")
        if devices.current() != index:
            devices.launched_elsewhere[f"{func._schema.name} at {place(2)}"] += 1
        stream = devices.actor(index)
        machine.launch(devices.thread, stream, func._schema.name, reads, writes)
        if name in READS:
            devices.synchronize(machine.now(stream), name)
        elif name in ("copy_", "_to_copy"):
            self._cross(args, kwargs, result, index)

    def _cross(self, args: Any, kwargs: Any, result: torch.Tensor, index: int) -> None:
        """A copy between host and device blocks the host, unless the host's memory is locked and it may be left
        running."""
        source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
        if source.device.type == result.device.type:
            return
        host = source if source.device.type == "cpu" else result
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if not (non_blocking and self.devices.is_locked(host)):
            kind = "copy of locked memory" if self.devices.is_locked(host) else "copy of pageable memory"
            self.devices.synchronize(self.devices.machine.now(self.devices.actor(index)), kind)

    # ---- accesses ----------------------------------------------------------------------------------------------------

    def _accesses(
        self, func: Any, args: Any, kwargs: Any, result: Any
    ) -> tuple[list[tuple[int, Range]], list[tuple[int, Range]]]:
        """The storages and bytes that an operation reads and writes, by its schema."""
        reads, writes, own = [], [], set()
        declared = func._schema.arguments
        named = [
            *zip(declared, args, strict=False),
            *((argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs),
        ]
        for argument, value in named:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                own.add(_key(tensor))
                self.storages.see(tensor)
                (writes if is_written else reads).append((_key(tensor), extent(tensor)))
        for tensor in _tensors(result):
            if _key(tensor) not in own:
                self.storages.see(tensor)
                writes.append((_key(tensor), extent(tensor)))
        return reads, writes


class Storages:
    """Every storage that an operation has used, and when its memory comes and goes."""

    def __init__(self, devices: Devices) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._devices = devices
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self.resize(storage, size)  # type: ignore[method-assign]

    def see(self, tensor: torch.Tensor) -> None:
        """Watch the tensor's storage from now on; a fake one gets memory on the current stream of its device."""
        if tensor.device.type not in ("cpu", "cuda"):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        if isinstance(tensor, FakeTensor):
            devices = self._devices
            devices.allocator.allocate(key, storage.nbytes(), devices.actor(tensor.device.index), devices.thread)
            self._alive[key] = weakref.ref(storage, lambda _: self._device_storage_went(key))
        else:
            self._devices.machine.came(key)
            start = storage.data_ptr()
            self._devices.hosts[key] = (start, start + storage.nbytes())
            self._alive[key] = weakref.ref(storage, lambda _: self._host_storage_went(key))

    def lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor in page-locked memory, which torch's allocator of such memory keeps for ever."""
        self.see(tensor)
        self._devices.locked[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        key, devices = storage._cdata, self._devices
        if key in self._alive and key not in devices.hosts:
            before = storage.nbytes()
            if before and not size:
                devices.allocator.free(key, devices.thread)
            elif size and not before:
                devices.allocator.free(key, devices.thread)  # an empty block
                devices.allocator.allocate(key, size, devices.actor(devices.index), devices.thread)
        return self._resize(storage, size)

    def _device_storage_went(self, key: int) -> None:
        del self._alive[key]
        self._devices.allocator.free(key, self._devices.thread)

    def _host_storage_went(self, key: int) -> None:
        """Memory that is freed while a stream still copies from or to it belongs to something else then."""
        del self._alive[key]
        del self._devices.hosts[key]
        self._devices.machine.went(key, self._devices.machine.now(self._devices.thread))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(_iterate(value))


def _iterate(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _iterate(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _iterate(item)


def extent(tensor: torch.Tensor) -> Range:
    """The bytes of its storage from a tensor's first to its last element."""
    if tensor.numel() == 0:
        return (0, 0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start, item = int(tensor.storage_offset()), tensor.element_size()
    return start * item, (start + last + 1) * item
