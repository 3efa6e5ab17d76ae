"""Bytes of activations, from a record of which storages one step made and let go. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

# A storage of one number is left out: losses, counts, and what torch makes of a Python number or not, as it likes.
ONE_NUMBER_BYTES = 8


@dataclass(frozen=True)
class ActivationBytes:
    """What one micro-batch takes on a rank's device beside model states, parameters' gradients and its inputs.

    kept: from forward to backward, of which `kept_outside` was made outside of the repeated blocks (embedding, head,
    logits, loss). peak: at the worst moment of forward and backward, of which `peak_outside` was made by the forward
    outside of the blocks and `peak_backward` by the backward, recomputation included. host: at rest in the host's
    memory from forward to backward.
    """

    kept: int
    kept_outside: int
    peak: int
    peak_outside: int
    peak_backward: int
    host: int = 0


@dataclass
class Trace:
    """Storages in the order in which a step made them: their bytes, and whether blocks made them in their forward.

    events: number + 1 where that storage came, -(number + 1) where it went. forward_end: events before the backward.
    """

    sizes: list[int] = field(default_factory=list)
    in_blocks: list[bool] = field(default_factory=list)
    on_host: list[bool] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    forward_end: int = 0

    def came(self, nbytes: int, *, in_block: bool, on_host: bool = False) -> int:
        """Its number."""
        self.sizes.append(nbytes)
        self.in_blocks.append(in_block)
        self.on_host.append(on_host)
        self.events.append(len(self.sizes))
        return len(self.sizes) - 1

    def went(self, number: int) -> None:
        self.events.append(-(number + 1))

    def same_steps(self, other: Trace) -> bool:
        """Whether both came and went alike, whatever their sizes."""
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
        """The storages that are there after so many events."""
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
    """Of a micro-batch between two that were counted; None where that cannot be said without counting it.

    Each storage's size is a whole number plus another times the micro-batch, as shapes are; two sizes give both. Where
    the two steps made and let go the same storages in the same order, so does the step between them: what depends on
    the size of a batch (a tile more, another kernel) changes at some size and not back again.
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
