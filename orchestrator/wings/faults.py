"""Injects faults to test what happens when a rank fails: ZLAB_FAULT=raise@step3:rank1.

`slow@step1:rank0:7ms` makes each step that much slower, to test what a comparison finds.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator import wings
from orchestrator.worker.listeners import Listener, RankRun

VARIABLE = wings.FAULT
KINDS = ("raise", "sigkill", "hang", "oom", "slow")
SLOW_S = 1.0
# More memory than any machine has, so that the allocator itself refuses.
_TOO_MUCH_BYTES = 1 << 60
_FORM = re.compile(rf"({'|'.join(KINDS)})@step(\d+):rank(\d+)(?::(\d+(?:\.\d+)?)ms)?")


class InjectedFault(RuntimeError):
    """Raised because ZLAB_FAULT requested it."""


@dataclass(frozen=True)
class Faults:
    """At most one fault: its kind, its step (1-based) and its rank; and how late a slow rank is in each step."""

    kind: str | None = None
    step: int = 0
    rank: int = 0
    slow_s: float = SLOW_S

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Faults:
        """The fault that ZLAB_FAULT describes; none if the variable is not set."""
        text = environment.get(VARIABLE, "")
        if not text:
            return cls()
        match = _FORM.fullmatch(text)
        if match is None or (match[4] is not None and match[1] != "slow"):
            raise ValueError(f"{VARIABLE} must be like {'|'.join(KINDS)}@step3:rank1, found {text!r}")
        return cls(match[1], int(match[2]), int(match[3]), SLOW_S if match[4] is None else float(match[4]) / 1e3)

    def problem(self, ranks: int, steps: int) -> str:
        """Why the fault can never trigger in a run of this many ranks and steps; empty if it can."""
        if self.kind is None or (self.rank < ranks and 1 <= self.step <= steps):
            return ""
        return (
            f"{VARIABLE}: expected a rank from 0 to {ranks - 1} and a step from 1 to {steps}, found "
            f"{self.kind}@step{self.step}:rank{self.rank}, which would never act; change it or unset {VARIABLE}"
        )

    def at_step(self, step: int, rank: int) -> None:
        """Raises, dies or never returns if the fault is for this step and rank. A slow rank is late from then on."""
        if self.kind == "slow" and rank == self.rank and step >= self.step:
            time.sleep(self.slow_s)
        if self.kind in (None, "slow") or (step, rank) != (self.step, self.rank):
            return
        if self.kind == "oom":
            import torch  # imported here: tests with a stub worker do not need torch

            torch.empty(_TOO_MUCH_BYTES, dtype=torch.uint8)
        if self.kind == "raise":
            raise InjectedFault(f"{VARIABLE} raised on rank {rank} at step {step}")
        if self.kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(1)


class FaultListener(Listener):
    """Lets the fault act in the step that it names."""

    def __init__(self, run: RankRun) -> None:
        super().__init__(run)
        self._faults = Faults.from_env()

    def before_step(self, step: int) -> None:
        self._faults.at_step(step, self.run.rank.rank)


def problem_of(sizes: Sequence[tuple[int, int | None]]) -> str:
    """Why the fault acts in none of these runs, given as ranks and steps, which are None where nobody knows them; empty
    if it acts in one. ValueError if it cannot be parsed."""
    fault = Faults.from_env()
    problems = [fault.problem(ranks, steps or fault.step) for ranks, steps in sizes]
    return problems[0] if all(problems) else ""
