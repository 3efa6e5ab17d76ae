"""Faults put in on purpose, so that what happens when a rank dies can be tested: ZLAB_FAULT=raise@step3:rank1."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "ZLAB_FAULT"
_FORM = re.compile(r"(raise|sigkill|hang)@step(\d+):rank(\d+)")


class InjectedFault(RuntimeError):
    """Raised because ZLAB_FAULT asked for it."""


@dataclass(frozen=True)
class Faults:
    """At most one fault: what happens, at which step (1-based) and on which rank."""

    kind: str | None = None
    step: int = 0
    rank: int = 0

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Faults:
        """No fault when the variable is not set."""
        text = environment.get(VARIABLE, "")
        if not text:
            return cls()
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{VARIABLE} must be like raise|sigkill|hang@step3:rank1, found {text!r}")
        return cls(match[1], int(match[2]), int(match[3]))

    def at_step(self, step: int, rank: int) -> None:
        """Raises, dies or never returns when the fault is of this step and rank; else does nothing."""
        if self.kind is None or (step, rank) != (self.step, self.rank):
            return
        if self.kind == "raise":
            raise InjectedFault(f"{VARIABLE} raised on rank {rank} at step {step}")
        if self.kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(1)
