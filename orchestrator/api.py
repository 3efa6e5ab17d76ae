"""The Python interface for notebooks: `run("zero=stage2")`, `sweep("zero=stage1,stage2")` and `plan(...)`.

Their results are lists that display themselves as the command line's tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from orchestrator.commands.line import sweep_request
from orchestrator.config.strict import Refusal
from orchestrator.records import sweep_record
from orchestrator.records.ownership import for_the_owner_alone
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned
from orchestrator.report import comparison, ranking, sweep_files, sweep_table
from orchestrator.report.ranking import Ranked
from orchestrator.text.streams import complain

__all__ = ["Planned", "Record", "Refusal", "SweepPlan", "SweepResults", "plan", "run", "sweep"]


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


class SweepResults(list[Record]):
    """The records of a sweep, the best first. Displayed as its table, in a notebook too.

    folder: that of the sweep, with report.md, report.html and results.csv.
    """

    def __init__(self, records: Iterable[Record], ranked: Sequence[Ranked], folder: Path) -> None:
        super().__init__(records)
        self.folder = folder
        self._ranked = ranked

    @property
    def conclusion(self) -> str:
        """The best point, the tie, or why nothing is ranked."""
        return ranking.conclusion(self._ranked)

    def rows(self) -> list[dict[str, object]]:
        """The rows of results.csv: unrounded numbers in base units, a column for each setting that differs."""
        return sweep_files.result_rows(self._ranked)

    def to_frame(self) -> Any:
        """`rows` as a pandas.DataFrame. Raises ImportError without pandas."""
        return _frame(self.rows())

    def __repr__(self) -> str:
        found = ranking.tables(self._ranked).items()
        texts = [f"{name}:\n{sweep_files.plain(one)}" if name else sweep_files.plain(one) for name, one in found]
        return "\n".join([*texts, self.conclusion])

    def _repr_html_(self) -> str:
        found = ranking.tables(self._ranked).items()
        texts = [
            f"<p>{escape(name)}:</p>{sweep_files.html(one)}" if name else sweep_files.html(one) for name, one in found
        ]
        return f"{''.join(texts)}<p>{escape(self.conclusion)}</p>"


class SweepPlan(list[Planned]):
    """The points of a sweep, predicted and decided. Displayed as the table of --plan, in a notebook too."""

    def rows(self) -> list[dict[str, object]]:
        """One row per point: its label, decision, reason, overrides, and the predicted bytes of a rank."""
        sizes = (*sweep_table.STATES, "needed")
        return [
            {
                "label": point.label,
                "decision": sweep_table.word(point.decision, "to run"),
                "reason": point.reason,
                **{f"{name}_bytes": point.predicted.get(name) for name in sizes},
                "overrides": " ".join(point.overrides),
            }
            for point in self
        ]

    def to_frame(self) -> Any:
        """`rows` as a pandas.DataFrame. Raises ImportError without pandas."""
        return _frame(self.rows())

    def __repr__(self) -> str:
        return sweep_files.plain(sweep_table.plan_table(self))

    def _repr_html_(self) -> str:
        return sweep_files.html(sweep_table.plan_table(self))


def run(*overrides: str, progress: bool | None = None) -> Record:
    """Measures one configuration and blocks until it has ended. Other commands can watch it in the meantime.

    A configuration that is predicted not to fit is not started: its state is `pruned`, and its message says what would
    fit. The word "--prune" with "off" after it runs it anyway. progress: as for `sweep`.
    """
    (record,) = sweep(*overrides, progress=progress)
    return record


def sweep(*words: str, progress: bool | None = None) -> SweepResults:
    """Measures every point, or takes its recorded result as the command line does. Returns the records, best first.

    `words` are overrides and flags as typed on the command line ("zero=stage1,stage2", "--fresh"). Points run in
    separate processes and share no state with the caller. Files are written so that only the user can read them: this
    process's umask is 077 until the call returns. Raises `Refusal`, whose message lists every problem.

    progress: shows the running points on stderr, as `watch` does; None: if stderr is a terminal.
    """
    request, hardware = sweep_request(["-m", *_without_multirun(words)])
    from orchestrator.commands.sweep import run_quietly
    from orchestrator.report.screen import Screen, make_console

    shown = sys.stderr.isatty() if progress is None else progress
    with for_the_owner_alone():
        paths = run_quietly(request, hardware, Screen(make_console(on_stderr=True)) if shown else None)
    ranked = comparison.ranked(paths)
    order = [row.entry.label for row in ranked]
    records = [_record(standing) for standing in sweep_record.standings(paths)]
    if all(record.state is RunState.refused for record in records):
        raise Refusal(list(dict.fromkeys(record.message for record in records)))
    return SweepResults(sorted(records, key=lambda record: order.index(record.label)), ranked, paths.root)


def plan(*words: str) -> SweepPlan:
    """What `sweep` would do with the same words: each point with its decision and predicted memory. Starts nothing.

    A count that takes seconds says on stderr how far it is. Raises `Refusal` if every point is refused.
    """
    request, hardware = sweep_request(["-m", "--plan", *_without_multirun(words)])
    from orchestrator.commands.sweep import decided

    return SweepPlan(decided(request, hardware, tell=complain))


def _without_multirun(words: Sequence[str]) -> list[str]:
    for word in words:
        if not isinstance(word, str):
            raise Refusal([f"expected words as strings, found {word!r}      fix: for a list, sweep(*words)"])
        if len(parts := word.split()) > 1 and "=" in parts[-1].strip("=") and "=" in parts[0]:
            raise Refusal([f"expected one word a string, found '{word}'      fix: {', '.join(map(repr, parts))}"])
    return [word for word in words if word not in ("-m", "--multirun", "--plan")]


def _frame(rows: Sequence[Mapping[str, object]]) -> Any:
    try:
        import pandas  # an optional library: no command needs it
    except ImportError:
        raise ImportError("to_frame() needs pandas: `pip install pandas`, or use rows()") from None
    return pandas.DataFrame(rows)


def _record(standing: sweep_record.Standing) -> Record:
    folder = standing.attempt.root if standing.attempt else None
    return Record(standing.label, standing.state, standing.planned.overrides, standing.result, standing.message, folder)
