"""Drives an allocator of a device and the model of it through one random sequence, and returns the first difference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Protocol

from zero_runtime.predict.memory.caching_allocator import MIB, AllocatorSettings, CachingAllocator, OutOfDeviceMemory

LARGEST = 64 * MIB
LOOK_EVERY = 50  # events between two comparisons of all segments
Segments = list[tuple[int, int, tuple[tuple[int, bool], ...]]]  # address, stream, the blocks' bytes and states


class DeviceAllocator(Protocol):
    """What is compared with the model: allocated and reserved bytes, and what is where."""

    def allocate(self, key: int, nbytes: int, stream: int) -> int | None:
        """The address; None: out of memory."""

    def free(self, key: int) -> None: ...

    def empty_cache(self) -> None: ...

    def totals(self) -> tuple[int, int]: ...

    def segments(self) -> Segments: ...


def sequence(seed: int, events: int, streams: int = 2, live: int = 150) -> Iterator[tuple[str, int, int, int]]:
    """(what, key, bytes, stream) for as many events: sizes of 1 byte to 64 MiB, mostly below 1 MiB.

    At most `live` allocations at a time; some sizes occur again, as those of a training step do.
    """
    rng = random.Random(seed)
    usual = [int(2 ** rng.uniform(9, 26)) for _ in range(12)]
    keys: list[int] = []
    for number in range(events):
        chance = rng.random()
        if chance < 0.01:
            yield "empty", 0, 0, 0
        elif keys and (len(keys) == live or chance < 0.48):
            yield "free", keys.pop(rng.randrange(len(keys))), 0, 0
        else:
            nbytes = rng.choice(usual) if chance < 0.7 else round(LARGEST ** rng.random())
            yield "allocate", number, nbytes, rng.randrange(streams)
            keys.append(number)


def first_difference(
    device: DeviceAllocator, settings: AllocatorSettings, limit: int | None, seed: int, events: int
) -> str | None:
    """None: after every event the device and the model have the same totals and addresses, and at times all blocks.

    The model's segments lie where the device's do: which of two free blocks of one size is taken depends on it.
    """
    address = 0
    model = CachingAllocator(limit, settings, lambda nbytes: address)
    refused = set()
    for count, (what, key, nbytes, stream) in enumerate(sequence(seed, events)):
        where = f"event {count}, {what} of {nbytes} bytes on stream {stream}"
        if what == "empty":
            device.empty_cache()
            model.empty_cache()
        elif what == "free":
            if key not in refused:
                device.free(key)
                model.free(key)
        else:
            given = device.allocate(key, nbytes, stream)
            address = given or 0
            try:
                model.allocate(key, nbytes, stream)
                expected: int | None = model.address(key)
            except OutOfDeviceMemory:
                expected = None
                refused.add(key)
            if given != expected:
                return f"{where}: the model's address is {expected}, the device's {given}"
        if device.totals() != (model.allocated, model.reserved):
            return (
                f"{where}: the model's totals are {(model.allocated, model.reserved)}, the device's {device.totals()}"
            )
        if count % LOOK_EVERY == 0:
            blocks = [(one.address, one.stream, one.blocks) for one in model.segments()]
            if blocks != device.segments():
                return f"{where}: the model's blocks are not those of the device"
    return None
