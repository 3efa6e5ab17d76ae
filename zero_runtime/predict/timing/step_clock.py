"""The clock of a predicted step: one rank's computing, and collectives that run beside it. Standard library only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

EXHAUSTED_S = 1e-15  # less work than this is rounding


@dataclass(eq=False)
class InFlight:
    """A collective under way. left_s: its time when nothing else runs."""

    left_s: float


@dataclass
class StepClock:
    """Time of one rank. Transfers run one after the other, in the order of their issue.

    computing_s: the time that computing took so far, and plain_s: that it would have taken alone; exposed_s: waiting
    for transfers; sent_s: that all transfers take when nothing else runs; meetings: how often ranks have exchanged
    messages.
    """

    compute_slowdown: float = 0.0
    link_slowdown: float = 0.0
    computing_s: float = 0.0
    plain_s: float = 0.0
    exposed_s: float = 0.0
    sent_s: float = 0.0
    meetings: int = 0
    _queue: deque[InFlight] = field(default_factory=deque)

    def compute(self, seconds: float) -> None:
        """Compute what takes this long when no transfer is under way."""
        self.plain_s += seconds
        while seconds > EXHAUSTED_S:
            if not self._queue:
                self.computing_s += seconds
                return
            first = self._queue[0]
            both_s = min(seconds * (1 + self.compute_slowdown), first.left_s * (1 + self.link_slowdown))
            seconds -= both_s / (1 + self.compute_slowdown)
            self._advance(first, both_s / (1 + self.link_slowdown))
            self.computing_s += both_s

    def issue(self, seconds: float, meetings: int = 1) -> InFlight:
        """Begin a transfer behind those under way."""
        self.meetings += meetings
        self.sent_s += seconds
        transfer = InFlight(seconds)
        if seconds > 0:
            self._queue.append(transfer)
        return transfer

    def wait(self, transfer: InFlight) -> None:
        """Wait until the transfer has ended, and so have all issued before it."""
        while transfer in self._queue:
            first = self._queue[0]
            self.exposed_s += first.left_s
            self._advance(first, first.left_s)

    def _advance(self, first: InFlight, seconds: float) -> None:
        first.left_s -= seconds
        if first.left_s <= EXHAUSTED_S:
            self._queue.popleft()
