"""The comparison of a sweep, computed from its records for the terminal, report.md and results.csv."""

from __future__ import annotations

from pathlib import Path

from orchestrator.exit_codes import FAILED, INCOMPLETE, NOTHING_FITS, OK
from orchestrator.records.record_file import read_or_warn, warn_once, write_text_atomic
from orchestrator.records.record_shapes import RESULT, SWEEP
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Standing, SweepPaths, standings
from orchestrator.report import ranking, sweep_files
from orchestrator.report.ranking import Entry, Ranked


def _entry(standing: Standing) -> Entry:
    result = standing.result()
    return Entry(
        standing.label,
        standing.state.value,
        result,
        standing.message,
        str(standing.attempt.root) if standing.attempt else "",
        standing.planned.overrides,
        None if result is None else result.get("measured_at", _ended_at(standing)),
        standing.planned.config,
        read_or_warn(AttemptPaths(Path(anchor)).result, RESULT) if (anchor := standing.planned.anchor) else None,
    )


def _ended_at(standing: Standing) -> float | None:
    """The end of the attempt, for older results that do not record when they were measured."""
    return (read_or_warn(standing.attempt.state) or {}).get("time") if standing.attempt is not None else None


def ranked(sweep: SweepPaths) -> list[Ranked]:
    """The points, ordered by the sweep's metric."""
    metric = (read_or_warn(sweep.sweep, SWEEP) or {}).get("rank_by")
    entries = [_entry(standing) for standing in standings(sweep)]
    return ranking.rank(entries, metric if metric in ranking.METRICS else ranking.DEFAULT_METRIC)


def write(sweep: SweepPaths) -> list[str]:
    """Writes report.md and results.csv. Returns the names of the files written; a full disk must not hide the rest."""
    rows = ranked(sweep)
    texts = {sweep.report: sweep_files.report_md(sweep.name, rows), sweep.results: sweep_files.results_csv(rows)}
    return [str(path) for path, text in texts.items() if _is_written(path, text)]


def _is_written(path: Path, text: str) -> bool:
    try:
        write_text_atomic(path, text)
    except OSError as error:
        warn_once(f"{path} could not be written: {error.strerror}")
        return False
    return True


def markdown(sweep: SweepPaths) -> str:
    """The table in Markdown."""
    return sweep_files.markdown(ranking.table(ranked(sweep)))


def exit_code(standings: list[Standing]) -> int:
    """0: every point has an answer. 1: at least one failed. 3: some are not done. 4: nothing fits."""
    return exit_code_of({standing.state for standing in standings})


def exit_code_of(states: set[RunState]) -> int:
    """The exit code for a set of states."""
    if states & {RunState.error, RunState.hang, RunState.timeout, RunState.lost}:
        return FAILED
    if not all(state.answered for state in states):
        return INCOMPLETE
    return OK if any(state.measured for state in states) else NOTHING_FITS
