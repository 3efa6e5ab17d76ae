"""Drives an allocator of a device and the model of it through one random sequence, and returns the first difference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Protocol

from zero_runtime.predict.memory.caching_allocator import MIB, BlockPool, CachingAllocator

LARGEST = 64 * MIB
LOOK_EVERY = 50  # events between two comparisons of all blocks
Blocks = tuple[tuple[int, bool], ...]  # of one segment in the order of addresses: bytes, and whether it is allocated


class DeviceAllocator(Protocol):
    """What is compared with the model: allocated and reserved bytes, and the blocks of all segments in any order."""

    def allocate(self, key: int, nbytes: int) -> None: ...

    def free(self, key: int) -> None: ...

    def totals(self) -> tuple[int, int]: ...

    def segments(self) -> list[Blocks]: ...


def sequence(seed: int, events: int, live: int = 150) -> Iterator[tuple[str, int, int]]:
    """(what, key, bytes) for as many events: sizes of 1 byte to 64 MiB, mostly below 1 MiB.

    At most `live` allocations at a time; some sizes occur again, as those of a training step do.
    """
    rng = random.Random(seed)
    usual = [int(2 ** rng.uniform(9, 26)) for _ in range(12)]
    keys: list[int] = []
    for number in range(events):
        chance = rng.random()
        if keys and (len(keys) == live or chance < 0.48):
            yield "free", keys.pop(rng.randrange(len(keys))), 0
        else:
            yield "allocate", number, rng.choice(usual) if chance < 0.7 else round(LARGEST ** rng.random())
            keys.append(number)


def blocks_of(pool: BlockPool) -> Blocks:
    """The blocks of a pool of the model."""
    found, block = [], pool.last
    while block is not None:
        found.append((block.size, block.allocated))
        block = block.before
    return tuple(reversed(found))


def segments_of(model: CachingAllocator) -> list[Blocks]:
    return [blocks_of(pool) for pool in (model.small, model.large) if pool.last is not None]


def first_difference(device: DeviceAllocator, seed: int, events: int) -> str | None:
    """None: after every event the device and the model have the same totals, and at times the same blocks."""
    model, held = CachingAllocator(), {}
    for count, (what, key, nbytes) in enumerate(sequence(seed, events)):
        where = f"event {count}, {what} of {nbytes} bytes"
        if what == "free":
            device.free(key)
            model.free(held.pop(key))
        else:
            device.allocate(key, nbytes)
            held[key] = model.allocate(nbytes)
        found = model.allocated, model.reserved
        if device.totals() != found:
            return f"{where}: the model's totals are {found}, the device's {device.totals()}"
        if count % LOOK_EVERY == 0 and sorted(segments_of(model)) != sorted(device.segments()):
            return f"{where}: the model's blocks are not those of the device"
    return None
