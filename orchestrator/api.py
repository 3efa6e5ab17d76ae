"""The same from Python, for a notebook: `sweep("zero=stage1,stage2")` and `run("zero=stage2")` return records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.commands.line import sweep_request
from orchestrator.config.strict import Refusal
from orchestrator.records import sweep_record
from orchestrator.records.run_state import RunState
from orchestrator.report import comparison
from zero_runtime.kernels.ownership import for_the_owner_alone

__all__ = ["Record", "Refusal", "run", "sweep"]


@dataclass(frozen=True)
class Record:
    """One point and its answer. `result` is what result.json holds; None where nothing was measured."""

    label: str
    state: RunState
    overrides: tuple[str, ...]
    result: dict[str, Any] | None
    message: str
    folder: Path | None

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the counted steps, of all ranks."""
        return self.result["throughput"]["tokens_per_second"]["median"] if self.result else None


def run(*overrides: str) -> Record:
    """Measures one configuration. Returns when it has ended; other commands may have it watched meanwhile."""
    (record,) = sweep(*overrides)
    return record


def sweep(*words: str) -> list[Record]:
    """Measures every point, or takes the answer that is there, as the command line does: the best first.

    `words` are overrides and flags as they would be typed ("zero=stage1,stage2", "--fresh"). Points run in processes
    of their own, so nothing of the caller's state is theirs. What is written is the user's alone, so that until it
    returns this process's umask is 077. Raises `Refusal`, whose message tells all that is wrong.
    """
    line = [word for word in words if word not in ("-m", "--multirun")]
    request, hardware = sweep_request(["-m", *line])
    from orchestrator.commands.sweep import run_quietly

    with for_the_owner_alone():
        paths = run_quietly(request, hardware)
    order = [one.entry.label for one in comparison.ranked(paths)]
    records = [_record(one) for one in sweep_record.standings(paths)]
    if all(one.state is RunState.refused for one in records):
        raise Refusal(list(dict.fromkeys(one.message for one in records)))
    return sorted(records, key=lambda one: order.index(one.label))


def _record(one: sweep_record.Standing) -> Record:
    folder = one.attempt.root if one.attempt else None
    return Record(one.label, one.state, one.planned.overrides, one.result(), one.message, folder)
