"""Computes bytes of activations from a trace of the storages that one step created and freed. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

# Storages of one number are ignored: losses, counts, and Python numbers, which torch may or may not wrap.
ONE_NUMBER_BYTES = 8


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one micro-batch on a rank's device, without model states, gradients of parameters and its inputs.

    kept: held from forward to backward; `kept_outside` is the part created outside the repeated blocks (embedding,
    head, logits, loss). peak: held at the worst moment of forward and backward; `peak_outside` is the part created by
    the forward outside the blocks, `peak_backward` the part created by the backward, recomputation included. host: held
    in host memory from forward to backward.
    """

    kept: int
    kept_outside: int
    peak: int
    peak_outside: int
    peak_backward: int
    host: int = 0


@dataclass
class Trace:
    """Storages in the order in which a step created them: their bytes, and whether the forward of a block created them.

    events: number + 1 when that storage was created, -(number + 1) when it was freed. forward_end: number of events
    before the backward.
    """

    sizes: list[int] = field(default_factory=list)
    in_blocks: list[bool] = field(default_factory=list)
    on_host: list[bool] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    forward_end: int = 0

    def came(self, nbytes: int, *, in_block: bool, on_host: bool = False) -> int:
        """Record a new storage and return its number."""
        self.sizes.append(nbytes)
        self.in_blocks.append(in_block)
        self.on_host.append(on_host)
        self.events.append(len(self.sizes))
        return len(self.sizes) - 1

    def went(self, number: int) -> None:
        self.events.append(-(number + 1))

    def same_steps(self, other: Trace) -> bool:
        """Whether both traces create and free storages in the same order, whatever the sizes."""
        mine = (self.events, self.in_blocks, self.on_host, self.forward_end)
        return mine == (other.events, other.in_blocks, other.on_host, other.forward_end)

    def total(self) -> ActivationBytes:
        kept = self._alive(self.forward_end)
        outside = [one for one in kept if not self.in_blocks[one]]
        running = list(accumulate(self._change(event) for event in self.events))
        worst = max(range(len(running)), key=running.__getitem__, default=-1)
        alive = self._alive(worst + 1)
        made_by_forward = max((event for event in self.events[: self.forward_end]), default=0)
        return ActivationBytes(
            kept=self._bytes(kept),
            kept_outside=self._bytes(outside),
            peak=self._bytes(alive),
            peak_outside=self._bytes(one for one in alive if one < made_by_forward and not self.in_blocks[one]),
            peak_backward=self._bytes(one for one in alive if one >= made_by_forward),
            host=sum(self.sizes[one] for one in kept if self.on_host[one]),
        )

    def _change(self, event: int) -> int:
        number = abs(event) - 1
        return 0 if self.on_host[number] else self.sizes[number] * (1 if event > 0 else -1)

    def _alive(self, count: int) -> list[int]:
        """Numbers of the storages that exist after the first `count` events."""
        found: dict[int, None] = {}
        for event in self.events[:count]:
            if event > 0:
                found[event - 1] = None
            else:
                found.pop(-event - 1, None)
        return list(found)

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.sizes[one] for one in numbers if not self.on_host[one])


def between(first: tuple[int, Trace], second: tuple[int, Trace], micro: int) -> ActivationBytes | None:
    """Bytes of a micro-batch size between two that were traced; None if that size must be traced itself.

    Each storage's size is an integer plus another integer times the micro-batch, as shapes are; two traces determine
    both integers. If the two steps create and free the same storages in the same order, so does the step between them:
    behaviour that depends on the batch size (one more tile, another kernel) changes at some size and not back again.
    """
    (low, small), (high, large) = first, second
    if not low < micro < high or not small.same_steps(large):
        return None
    sizes = []
    for one, other in zip(small.sizes, large.sizes, strict=True):
        slope, rest = divmod(other - one, high - low)
        if rest:
            return None
        sizes.append(one + slope * (micro - low))
    return Trace(sizes, small.in_blocks, small.on_host, small.events, small.forward_end).total()
