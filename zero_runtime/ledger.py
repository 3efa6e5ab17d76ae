"""The ledger of the messages and bytes that one rank sends.

It counts the bytes that a ring algorithm sends, which is also the minimum for any algorithm: an all-gather or
reduce-scatter of P elements over G ranks sends (G-1)/G * P from each rank, an all-reduce twice that. The bytes on the
wire depend on the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Volume:
    """The calls, elements and bytes that one rank sent with one kind of collective."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, elements: int, element_bytes: int, calls: int = 1) -> None:
        self.calls += calls
        self.elements += elements
        self.bytes += elements * element_bytes


# What messages are alike in: the collective, the unit, and the dtype of the tensor that is sent. A plain tuple, since
# every collective makes one.
Sent = tuple[str, str, torch.dtype]


@dataclass
class Ledger:
    """Volumes since the last `reset`; those of control messages (norms, losses, counts) separately."""

    sent: dict[Sent, Volume] = field(default_factory=dict)
    control: Volume = field(default_factory=Volume)

    def record(self, kind: str, unit: str, elements: int, dtype: torch.dtype) -> None:
        sent = (kind, unit, dtype)
        volume = self.sent.get(sent) or self.sent.setdefault(sent, Volume())
        volume.add(elements, dtype.itemsize)

    @property
    def data(self) -> dict[str, Volume]:
        """The volumes by kind of collective."""
        kinds: dict[str, Volume] = {}
        for (kind, _, dtype), volume in self.sent.items():
            kinds.setdefault(kind, Volume()).add(volume.elements, dtype.itemsize, volume.calls)
        return kinds

    @property
    def data_elements(self) -> int:
        return sum(volume.elements for volume in self.sent.values())

    def reset(self) -> Ledger:
        """Restart from zero; returns the volumes counted before."""
        counted = Ledger(self.sent, self.control)
        self.sent, self.control = {}, Volume()
        return counted
