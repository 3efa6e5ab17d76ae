"""Stand-ins for torch.cuda: devices, streams and events of the virtual GPU, and the host's waits for them.

They behave as torch documents it, with one difference: an event is complete for the host only after the
host has waited past it (see [Note: pending] in allocator.py).

[Note: contexts]
A process gets a context on a device, with hundreds of megabytes, when a thread does something there. `contexts` lists
the devices on which this rank has one. A new thread's current device is 0.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from functools import partialmethod
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from harness.virtual_gpu.allocator import Allocator
from harness.virtual_gpu.machine import DEPTH, Actor, Clock, Machine, Range, Sync, place
from harness.virtual_gpu.threads import Turns

STREAMS_PER_DEVICE = 1000  # ids of a device's streams; id 0 of a device is its default stream


class Devices:
    """The devices of one rank. `index` is the device that it should use."""

    def __init__(self, guard: ctypes.CDLL, machine: Machine, turns: Turns, index: int) -> None:
        guard.virtual_gpu_get_stream.restype = ctypes.c_long
        guard.virtual_gpu_set_stream.argtypes = [ctypes.c_int, ctypes.c_long]
        self.guard, self.machine, self.turns, self.index = guard, machine, turns, index
        self.allocator = Allocator(machine)
        self.contexts: set[int] = set()
        self.launched_elsewhere: Counter[str] = Counter()  # operations whose tensors' device was not current
        self.events_made = 0
        self.events_alive = 0
        self.locked: dict[int, int] = {}  # page-locked host memory: address and bytes
        self.hosts: dict[int, Range] = {}  # addresses [start, stop) of the host's storages that operations have used
        self._streams = 0

    # ---- this thread -------------------------------------------------------------------------------------------------

    @property
    def thread(self) -> Actor:
        return self.turns.actor

    def current(self) -> int:
        return self.guard.virtual_gpu_get_device()

    def make_current(self, index: int) -> None:
        self.contexts.add(index)
        self.guard.virtual_gpu_set_device(index)

    def touch(self) -> None:
        """Something that makes a context on the current device."""
        self.contexts.add(self.current())

    def actor(self, index: int | None = None) -> Actor:
        """The current stream of a device; None: of the current device."""
        index = self.current() if index is None else index
        return self.stream_actor(index, self.guard.virtual_gpu_get_stream(index))

    def stream_actor(self, index: int, stream: int) -> Actor:
        actor = ("stream", stream if index == self.index else stream + STREAMS_PER_DEVICE * (index + 1))
        self.machine.names.setdefault(actor, f"the default stream of device {index}")
        return actor

    def new_stream(self, index: int, name: str | None = None) -> int:
        self._streams += 1
        self.machine.names[self.stream_actor(index, self._streams)] = name or f"stream of {place(1)}"
        return self._streams

    # ---- the host waits ----------------------------------------------------------------------------------------------

    def synchronize(self, clock: Clock, kind: str) -> None:
        self.touch()
        self.machine.synchronize(self.thread, clock, kind)

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor's memory is page-locked, so that a copy with non_blocking does not block."""
        address = tensor.data_ptr()
        return any(start <= address and address + tensor.nbytes <= start + size for start, size in self.locked.items())


def index_of(device: Any, default: int) -> int:
    """torch's rule: an index, a device with or without index, a name, or None for the default."""
    if device is None:
        return default
    if isinstance(device, int):
        return default if device < 0 else device
    found = torch.device(device).index
    return default if found is None else found


class Stream:
    """torch.cuda.Stream."""

    def __init__(
        self, devices: Devices, device: Any = None, priority: int = 0, *, stream_id: int | None = None
    ) -> None:
        index = index_of(device, devices.current())
        self._devices, self.device, self.priority = devices, torch.device("cuda", index), priority
        if stream_id is None:
            devices.contexts.add(index)
            stream_id = devices.new_stream(index)
        self.stream_id = stream_id
        self.actor = devices.stream_actor(index, self.stream_id)

    @property
    def device_index(self) -> int:
        return self.device.index

    @property
    def device_type(self) -> int:
        return 1  # torch's number for CUDA

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.actor == self.actor

    def __hash__(self) -> int:
        return hash(self.actor)

    def wait_event(self, event: Event) -> None:
        self._devices.machine.follow(self.actor, event.clock, "stream waits for event")

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._devices)
        event.record(self)
        return event

    def query(self) -> bool:
        machine = self._devices.machine
        return machine.now(self.actor).get(self.actor, 0) <= machine.clocks[self._devices.thread].get(self.actor, 0)

    def synchronize(self) -> None:
        self._devices.synchronize(self._devices.machine.now(self.actor), "stream")


class Event:
    """torch.cuda.Event."""

    def __init__(self, devices: Devices, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._devices, self.clock, self._actor = devices, Clock(), None
        devices.events_made += 1
        devices.events_alive += 1

    def __del__(self) -> None:
        self._devices.events_alive -= 1

    def record(self, stream: Stream | None = None) -> None:
        devices = self._devices
        actor = devices.actor() if stream is None else stream.actor
        if stream is None:
            devices.touch()
        devices.machine.launch(devices.thread, actor, "event")
        self.clock, self._actor = devices.machine.now(actor), actor

    def wait(self, stream: Stream | None = None) -> None:
        devices = self._devices
        actor = devices.actor() if stream is None else stream.actor
        devices.machine.follow(actor, self.clock, "stream waits for event")

    def query(self) -> bool:
        seen = self._devices.machine.clocks[self._devices.thread]
        return self._actor is None or self.clock[self._actor] <= seen.get(self._actor, 0)

    def synchronize(self) -> None:
        self._devices.synchronize(self.clock, "event")

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class StreamContext:
    """torch.cuda.stream, step by step as torch does it: leaving makes the device current that was it before."""

    def __init__(self, devices: Devices, stream: Stream | None) -> None:
        self._devices, self._stream = devices, stream
        self._before: tuple[int, int, int] = (0, 0, 0)

    def __enter__(self) -> None:
        if self._stream is None:
            return
        guard, index = self._devices.guard, self._stream.device.index
        current = self._devices.current()
        self._before = (current, guard.virtual_gpu_get_stream(current), guard.virtual_gpu_get_stream(index))
        self._set(index, self._stream.stream_id)

    def _set(self, index: int, stream: int) -> None:
        self._devices.make_current(index)
        self._devices.guard.virtual_gpu_set_stream(index, stream)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._stream is None:
            return
        current, stream, other = self._before
        if current != self._stream.device.index:
            self._set(self._stream.device.index, other)
        self._set(current, stream)


class DeviceContext:
    """torch.cuda.device."""

    def __init__(self, devices: Devices, device: Any) -> None:
        self._devices, self._index, self._before = devices, index_of(device, -1), -1

    def __enter__(self) -> None:
        self._before = self._devices.current()
        if self._index >= 0:
            self._devices.make_current(self._index)

    def __exit__(self, *_: object) -> None:
        self._devices.guard.virtual_gpu_set_device(self._before)  # torch makes no context when it restores a device


def _bound(kind: type, devices: Devices) -> type:
    """A subclass whose instances are made without naming the devices."""
    return type(kind.__name__, (kind,), {"__init__": partialmethod(kind.__init__, devices)})  # type: ignore[misc]


def install(devices: Devices) -> None:
    """Put the stand-ins into torch.cuda and torch.Tensor."""
    cuda, machine = torch.cuda, devices.machine

    def synchronize(device: Any = None) -> None:
        reached = Clock()
        for actor in list(machine.clocks):
            if actor[0] == "stream":
                reached.join(machine.clocks[actor])
        devices.synchronize(reached, "device")

    def current_stream(device: Any = None) -> Stream:
        index = index_of(device, devices.current())
        return Stream(devices, index, stream_id=devices.guard.virtual_gpu_get_stream(index))

    def set_stream(stream: Stream) -> None:
        devices.make_current(stream.device.index)
        devices.guard.virtual_gpu_set_stream(stream.device.index, stream.stream_id)

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        site = f"record_stream at {place(DEPTH)}"
        machine.waits.add(site)
        if site not in machine.without:
            devices.allocator.record(tensor.untyped_storage()._cdata, stream.actor)

    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(1, device="cuda") copies by an operation that modes see
    cuda._lazy_init = lambda: None  # type: ignore[assignment]
    cuda.Stream = _bound(Stream, devices)  # type: ignore[misc]
    cuda.Event = _bound(Event, devices)  # type: ignore[misc]
    cuda.device = _bound(DeviceContext, devices)  # type: ignore[misc]
    cuda.stream = lambda stream: StreamContext(devices, stream)  # type: ignore[assignment]
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.device_of = lambda tensor: DeviceContext(  # type: ignore[misc,assignment]
        devices, tensor.device if tensor.device.type == "cuda" else None
    )
    cuda.current_stream = current_stream  # type: ignore[assignment]
    cuda.default_stream = lambda device=None: Stream(  # type: ignore[assignment]
        devices, index_of(device, devices.current()), stream_id=0
    )
    cuda.set_stream = set_stream  # type: ignore[assignment]
    cuda.synchronize = synchronize
    cuda.current_device = devices.current
    cuda.set_device = lambda device: devices.make_current(index_of(device, devices.current()))
    cuda.cudart = lambda: _runtime(devices)  # type: ignore[assignment]
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign,assignment]


def _runtime(devices: Devices) -> SimpleNamespace:
    """torch.cuda.cudart(): the two calls that lock and unlock host memory. Locking waits for the device."""

    machine = devices.machine

    def lock(address: int, size: int, _flags: int) -> int:
        machine.syncs.append(Sync("cudaHostRegister", place(1), machine.names[devices.thread]))
        devices.locked[address] = size
        return 0

    def unlock(address: int) -> int:
        """No copy may use the memory any more, as far as the host knows."""
        devices.locked.pop(address)
        for storage, (start, stop) in list(devices.hosts.items()):
            if start <= address < stop:
                machine.went(storage, machine.now(devices.thread))
        return 0

    return SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
