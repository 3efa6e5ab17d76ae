"""Turns one rank's readings into the result that users compare. Pure, except for reading the process's memory."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orchestrator.rounds.recorded import Round
from orchestrator.worker.accounts import Accounts
from zero_runtime.census import Census
from zero_runtime.ledger import Ledger

PHASES = ("data", "forward", "backward", "communication_exposed", "optimizer", "other")


@dataclass
class Readings:
    """The readings of one rank during one run."""

    step_s: list[float] = field(default_factory=list)
    phases_s: list[dict[str, float]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of this run's steps; nan where the engine computed none
    skipped: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    census: Census | None = None
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes by component and dtype, audited
    activations_bytes: int = 0
    validation_loss: float | None = None
    peaks: dict[str, int | None] | None = None  # of training, read before anything else was done

    def add_step(self, phases_s: dict[str, float]) -> float:
        """Adds a step by the seconds of its phases. Returns its seconds."""
        self.phases_s.append(phases_s)
        self.step_s.append(sum(phases_s.values()))
        return self.step_s[-1]


def begin_peak() -> None:
    """From here on the highest memory of this process is counted above what it holds now: what was imported, and what
    building a model on the meta device took, is no part of an engine's memory."""
    global _highest_before, _held_before
    _highest_before = max(_highest_before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    with suppress(OSError):  # where it is not permitted, memory that was freed before is missing in the difference
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest is now the present one
    _held_before = _highest()


def _highest() -> int:
    """The highest resident set of this process in bytes, since its start or the last `begin_peak`."""
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_highest_before = _held_before = 0


def peaks(device: torch.device) -> dict[str, int | None]:
    """Peak memory of this process so far, in bytes."""
    on_cuda = device.type == "cuda"
    return {
        # Linux counts KiB; `begin_peak` has reset the count.
        "peak_rss_bytes": max(_highest_before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "peak_above_start_bytes": None if on_cuda else _highest() - _held_before,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_cuda else None,
        # How often the allocator had to free its cache and retry: the run fits in memory, but slowly.
        "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if on_cuda else None,
    }


def memory(accounts: Accounts, worst: Mapping[str, int | None]) -> dict[str, Any]:
    """The memory part of the result, from the largest readings over the ranks (census, activations and `peaks`)."""
    states = accounts.states(worst)
    components = {"host", *(state["component"] for state in states["states"])}
    others = {key: value for key, value in worst.items() if key not in components}
    other = (others.pop("other") or 0) + (others.pop("buffers") or 0)
    return {**states, "other_tensors_bytes": other, **others}


def throughput(readings: Readings, tokens: int, samples: int, world: int, warmup_steps: int) -> dict[str, Any]:
    """Time, tokens and samples (sequences) per second over the steps that count. tokens, samples: of a step. Padding
    and masked tokens are counted too.

    A median is that of the rounds' medians; p10 and p90 are of all steps.
    """
    rounds = [one.step_ms for one in readings.rounds if one.used]
    rounds = rounds or [[seconds * 1e3 for seconds in readings.step_s[warmup_steps:]]]
    per_second = _of_rounds([[1e3 * tokens / ms for ms in steps] for steps in rounds])
    return {
        "tokens_per_second": per_second,
        "tokens_per_second_per_rank": per_second["median"] / world,
        "samples_per_second": per_second["median"] * samples / tokens,
        "step_ms": _of_rounds(rounds),
        "steps_counted": sum(map(len, rounds)),
        "warmup_steps": warmup_steps,
    }


def _of_rounds(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    median = statistics.median(statistics.median(steps) for steps in rounds)
    low, high = np.percentile([value for steps in rounds for value in steps], (10, 90)).tolist()
    return {"median": median, "p10": low, "p90": high}


def phases_ms(readings: Readings, warmup_steps: int) -> dict[str, float]:
    """Median milliseconds of each phase of a step."""
    steps = readings.phases_s[warmup_steps:]
    return {name: statistics.median(step.get(name, 0.0) for step in steps) * 1e3 for name in PHASES}


def worst_of(per_rank: list[dict[str, int | None]]) -> dict[str, int | None]:
    """The largest value of each number over the ranks; None if no rank has one."""
    return {key: max((readings[key] for readings in per_rank), key=lambda value: value or 0) for key in per_rank[0]}
