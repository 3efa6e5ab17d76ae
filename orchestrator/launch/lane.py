"""Points that share slots and take turns on them, and whether all their ranks fit into memory at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.schema import Device, from_dict
from orchestrator.launch.local_run import PointRun
from orchestrator.machine import hardware
from orchestrator.machine.slots import Lease
from orchestrator.records.run_record import Attempt, result_of
from orchestrator.records.sweep_record import Planned
from orchestrator.records.turns import open_turns
from orchestrator.rounds.order import TurnOrder
from orchestrator.rounds.recorded import Round, to_repeat
from orchestrator.text.units import size
from zero_runtime.offload_plan import Tier

# Memory of a rank's process besides what a prediction counts: Python, torch and its libraries.
PROCESS_BYTES = 600 << 20
# Share of the memory that ranks which wait may hold together: predictions leave out what kernels take for a moment.
HOST_SHARE, DEVICE_SHARE = 0.7, 0.9


@dataclass
class Lane:
    """Points on one lease of slots. One of them runs at a time.

    session: equal for all points that share rounds. warm: the ranks of all points stay alive between their turns;
    otherwise each turn is an attempt of its own, which continues the rounds of the one before.
    """

    lease: Lease
    points: Mapping[str, Planned]
    order: TurnOrder[str]
    session: str
    warm: bool
    rounds: int
    runs: dict[str, PointRun] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)  # the last one, of points that have another turn
    active: str | None = None
    looked_at: float = 0.0  # when the ranks that wait were looked at, on the monotonic clock

    @property
    def names(self) -> list[str]:
        """The slots, as tables show them."""
        return [slot.visible or slot.name.removeprefix("core") for slot in self.lease.slots]

    def end_turn(self) -> None:
        """The point whose turn it is waits for its next one, or its ranks have ended."""
        if self.active is not None:
            self.order.end_turn(self.active)
        self.active = None

    def leave(self, label: str) -> None:
        """The point gets no more turns."""
        self.order.leave(label)
        self.runs.pop(label, None)
        self.attempts.pop(label, None)
        if self.active == label:
            self.active = None

    @property
    def takes_turns(self) -> bool:
        """Whether there is another point to take turns with, from the beginning."""
        return len(self.points) > 1

    def prepare(self, label: str, attempt: Attempt) -> None:
        """Tells the ranks of an attempt that has not started about its turns."""
        if not self.takes_turns:
            return
        if self.warm:
            open_turns(attempt.paths, self.session)
            return
        last = self.attempts.get(label)
        earlier = [] if last is None else result_of(last.paths).get("rounds") or []
        number = self._next_round(label, earlier)
        open_turns(attempt.paths, self.session, number=number, earlier=earlier, short=not self.is_last(label))

    def goes_on(self, label: str, attempt: Attempt) -> bool:
        """Whether a measured attempt is followed by another at the same point."""
        if self.warm or not self.takes_turns:
            return False
        return self._next_round(label, result_of(attempt.paths).get("rounds") or []) is not None

    def is_last(self, label: str) -> bool:
        """Whether the attempt whose turn it is has all rounds in its result, apart from those measured once more. It
        makes all steps of the point, those before it only as many as a round has."""
        return self.warm or not self.takes_turns or self.order.turns(label) + 1 >= self.rounds

    def _next_round(self, label: str, measured: Sequence[Mapping[str, Any]]) -> int | None:
        """The number of the round that an attempt would be; None if nothing is left."""
        turns = self.order.turns(label)
        if turns < self.rounds:
            return turns + 1
        return next(iter(to_repeat([Round.of(one) for one in measured])), None)


def too_large_together(points: Sequence[Planned]) -> str:
    """Why the ranks of these points cannot be alive at the same time; empty if they can."""
    configs = [from_dict(point.config) for point in points]
    plans = [config.offload.plan() for config in configs]
    offloaded = [
        one.label
        for one, plan in zip(points, plans, strict=True)
        if plan.params is not Tier.DEVICE or plan.optimizer is not Tier.DEVICE
    ]
    # Page-locked memory and scratch files of ranks that wait are not in the predicted peaks below.
    if offloaded:
        return f"{offloaded[0]} keeps states in the host's memory or in files"
    needed = [_needed_bytes(point) for point in points]
    unknown = [point.label for point, one in zip(points, needed, strict=True) if one is None]
    if unknown:
        return f"the memory of {unknown[0]} is not predicted"
    known = [one or 0 for one in needed]
    on_device = 0
    if configs[0].resources.device is Device.cuda:
        on_device = sum(known)
        limit = min((point.predicted.get("limit") or 0 for point in points), default=0)
        if on_device > DEVICE_SHARE * limit:
            return f"together they need {size(on_device)} of a GPU's {size(limit)}"
    in_tensors = [0 if on_device else one for one in known]
    on_host = sum(config.ranks * (one + PROCESS_BYTES) for config, one in zip(configs, in_tensors, strict=True))
    free = hardware.free_bytes()
    if on_host > HOST_SHARE * free:
        return f"together they need {size(on_host)} of this machine's free {size(free)}"
    return ""


def _needed_bytes(point: Planned) -> int | None:
    """The most that a rank needs; None if its activations are not predicted."""
    most = point.predicted.get("at_most")
    return int(most) if most is not None else None
