"""Records the calls of torch.cuda that copies make, on a machine without a GPU: streams, events, locked memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

CPU = torch.device("cpu")


class RecordedCuda:
    """Replaces torch.cuda: records what each stream is told, in order, as (stream, action, event's number)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.current = self.compute = Stream(self, "compute")
        self.made = ["down", "up"]
        self.events = 0
        self.registered: dict[int, int] = {}
        self.error = 0
        self.current_devices: dict[int, object] = {}  # by thread

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, self.made.pop(0))

    def Event(self, **_: object) -> Event:
        self.events += 1
        return Event(self, self.events)

    def current_stream(self, device: object) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def set_device(self, device: object) -> None:
        self.current_devices[threading.get_ident()] = device

    def synchronize(self, device: object) -> None:
        self.calls.append(("host", "waits for", 0))

    def cudart(self) -> SimpleNamespace:
        def register(address: int, size: int, flags: int) -> int:
            self.registered[address] = size
            return self.error

        return SimpleNamespace(
            cudaHostRegister=register, cudaHostUnregister=lambda address: self.registered.pop(address) * 0
        )


class Stream:
    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self._cuda, self.name, self.device = cuda, name, CPU

    def wait_event(self, event: Event) -> None:
        self._cuda.calls.append((self.name, "waits for", event.number))

    def wait_stream(self, other: Stream) -> None:
        event = self._cuda.Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, cuda: RecordedCuda, number: int) -> None:
        self._cuda, self.number = cuda, number

    def record(self, stream: Stream) -> None:
        self._cuda.calls.append((stream.name, "records", self.number))

    def synchronize(self) -> None:
        self._cuda.calls.append(("host", "waits for", self.number))


def record_cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    """Record until the test ends. `record_stream` fails the test."""
    recorded = RecordedCuda()
    for name in ("Stream", "Event", "current_stream", "stream", "device", "set_device", "synchronize", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(recorded, name))

    def record_stream(*_: object) -> None:
        raise AssertionError("the memory would come back when the host sees an event, at any time")

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return recorded
