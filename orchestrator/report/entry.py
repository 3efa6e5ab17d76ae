"""One point of a sweep as a comparison sees it: its configuration, its result, and when and with what it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.records.run_state import RunState
from orchestrator.records.versions import Differing
from orchestrator.rounds import recorded


@dataclass(frozen=True)
class Entry:
    """One point of a sweep and how it ended. `result` is set exactly if it succeeded."""

    label: str
    state: str
    result: dict[str, Any] | None = None
    message: str = ""
    folder: str = ""
    overrides: tuple[str, ...] = field(default=())
    measured_at: float | None = None  # seconds since the epoch
    config: Mapping[str, Any] = field(default_factory=dict)  # of the point, as it is recorded
    anchor: Mapping[str, Any] | None = None  # its result of an earlier day, if it was measured again to compare
    differs: Differing = field(default_factory=dict)  # what it was made with that a run of the sweep would not be
    own: bool = False  # the sweep has measured it when it was typed before

    @property
    def is_reused(self) -> bool:
        """Whether another sweep measured it, or this one in another session or with other versions."""
        return self.state == RunState.cached.value and (not self.own or bool(self.differs))

    @property
    def others_share(self) -> float | None:
        """The share of the cores that other processes took during the measurement; None if unknown."""
        share: float | None = ((self.result or {}).get("load") or {}).get("others_share")
        return share

    @property
    def is_loaded(self) -> bool:
        """Whether that share is notable."""
        return self.others_share is not None and self.others_share >= recorded.NOTABLE_SHARE
