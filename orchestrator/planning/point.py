"""What is asked for: points, each resolved or refused, and what to do where they have answers already."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Broken, Refusal
from orchestrator.records.run_state import RETRIED, RunState


@dataclass(frozen=True)
class Point:
    """A configuration to run. `label`: a short name made of the values that vary, such as "stage2-bf16". `overrides`:
    the arguments that compose the configuration."""

    label: str
    config: RunConfig
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A point that breaks rules, and the rules that it breaks."""

    label: str
    overrides: tuple[str, ...]
    broken: tuple[Broken, ...]


@dataclass(frozen=True)
class Wishes:
    """What the user asks for. fresh: run all points again. retry: run points again whose kept answer is one of these
    states. prune: leave out points that cannot fit into memory. anchor: the label of a point that is measured once more
    if its answer is kept; empty: the first one of an earlier day, if there is one."""

    fresh: bool = False
    retry: frozenset[RunState] = frozenset()
    prune: bool = True
    anchor: str = ""


def retry_states(text: str) -> frozenset[RunState]:
    """The states in a text such as "error,oom". Refusal names the states that can be retried."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in RETRIED]:
        raise Refusal([f"--retry {','.join(unknown)}: expected some of {','.join(RETRIED)}"])
    return frozenset(RunState(word) for word in words)
