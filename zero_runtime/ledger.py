"""The ledger of the messages and bytes that one rank sends.

[Note: algorithmic volume]
The ledger counts the bytes that a ring algorithm sends, which is also the minimum for any algorithm: an all-gather or
reduce-scatter of P elements over G ranks sends (G-1)/G * P from each rank, an all-reduce twice that. The bytes on the
wire depend on the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Volume:
    """The calls, elements and bytes that one rank sent with one kind of collective."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def add(self, elements: int, element_bytes: int) -> None:
        self.calls += 1
        self.elements += elements
        self.bytes += elements * element_bytes


@dataclass
class Ledger:
    """Volumes since the last `reset`, by kind of collective; control messages (norms, losses, counts) separately."""

    data: dict[str, Volume] = field(default_factory=dict)
    control: Volume = field(default_factory=Volume)

    def record(self, kind: str, elements: int, element_bytes: int) -> None:
        volume = self.data.get(kind) or self.data.setdefault(kind, Volume())
        volume.add(elements, element_bytes)

    @property
    def data_elements(self) -> int:
        return sum(volume.elements for volume in self.data.values())

    def reset(self) -> Ledger:
        """Restart from zero; returns the volumes counted before."""
        counted = Ledger(self.data, self.control)
        self.data, self.control = {}, Volume()
        return counted
