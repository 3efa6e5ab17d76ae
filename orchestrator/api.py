"""The Python interface for notebooks: `run("zero=stage2")` and `sweep("zero=stage1,stage2")` return records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.commands.line import sweep_request
from orchestrator.config.strict import Refusal
from orchestrator.records import sweep_record
from orchestrator.records.ownership import for_the_owner_alone
from orchestrator.records.run_state import RunState
from orchestrator.report import comparison

__all__ = ["Record", "Refusal", "run", "sweep"]


@dataclass(frozen=True)
class Record:
    """One point of a sweep and its outcome. `result` is the content of result.json; None if nothing was measured."""

    label: str
    state: RunState
    overrides: tuple[str, ...]
    result: dict[str, Any] | None
    message: str
    folder: Path | None

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the counted steps, summed over all ranks."""
        return self.result["throughput"]["tokens_per_second"]["median"] if self.result else None


def run(*overrides: str) -> Record:
    """Measures one configuration and blocks until it has ended. Other commands can watch it in the meantime.

    A configuration that is predicted not to fit is not started: its state is `pruned`, and its message says what would
    fit. The word "--prune" with "off" after it runs it anyway.
    """
    (record,) = sweep(*overrides)
    return record


def sweep(*words: str) -> list[Record]:
    """Measures every point, or takes its recorded result as the command line does. Returns the records, best first.

    `words` are overrides and flags as typed on the command line ("zero=stage1,stage2", "--fresh"). Points run in
    separate processes and share no state with the caller. Files are written so that only the user can read them: this
    process's umask is 077 until the call returns. Raises `Refusal`, whose message lists every problem.
    """
    line = [word for word in words if word not in ("-m", "--multirun")]
    request, hardware = sweep_request(["-m", *line])
    from orchestrator.commands.sweep import run_quietly

    with for_the_owner_alone():
        paths = run_quietly(request, hardware)
    order = [row.entry.label for row in comparison.ranked(paths)]
    records = [_record(standing) for standing in sweep_record.standings(paths)]
    if all(record.state is RunState.refused for record in records):
        raise Refusal(list(dict.fromkeys(record.message for record in records)))
    return sorted(records, key=lambda record: order.index(record.label))


def _record(standing: sweep_record.Standing) -> Record:
    folder = standing.attempt.root if standing.attempt else None
    return Record(
        standing.label, standing.state, standing.planned.overrides, standing.result(), standing.message, folder
    )
