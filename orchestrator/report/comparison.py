"""The comparison of a sweep, computed from its records for the terminal and the files of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.exit_codes import FAILED, INCOMPLETE, NOTHING_FITS, OK
from orchestrator.records.record_file import read_or_warn, warn_once, write_bytes_atomic, write_text_atomic
from orchestrator.records.record_shapes import RESULT, SWEEP
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Standing, SweepPaths, standings
from orchestrator.report import ranking, sweep_files
from orchestrator.report.entry import Entry
from orchestrator.report.ranking import Ranked
from orchestrator.wings import REPORT_PARTS, load


class ReportPart(NamedTuple):
    """What a wing adds to the report of a sweep: the end of report.md, the pictures that it names, and files."""

    markdown: str
    pictures: Mapping[Path, str]
    files: Mapping[Path, str | bytes]


def _entry(standing: Standing) -> Entry:
    result = standing.result
    return Entry(
        standing.label,
        standing.state.value,
        result,
        standing.message,
        str(standing.attempt.root) if standing.attempt else "",
        standing.planned.overrides,
        None if result is None else result.get("measured_at"),
        standing.planned.config,
        read_or_warn(AttemptPaths(Path(anchor)).result, RESULT) if (anchor := standing.planned.anchor) else None,
        standing.planned.differs or {},
        standing.planned.own,
    )


def ranked(sweep: SweepPaths) -> list[Ranked]:
    """The points, ordered by the sweep's metric."""
    metric = (read_or_warn(sweep.sweep, SWEEP) or {}).get("rank_by")
    entries = [_entry(standing) for standing in standings(sweep)]
    return ranking.rank(entries, metric if metric in ranking.METRICS else ranking.DEFAULT_METRIC)


def write(sweep: SweepPaths, *, with_png: bool = False) -> list[str]:
    """Writes report.md, results.csv and the parts of wings: report.html and the pictures. with_png: also report.png,
    which takes longer.

    Returns the names of the files written, without those of the pictures; a full disk must not hide the rest.
    """
    rows = ranked(sweep)
    parts = [part for place in REPORT_PARTS if (part := _part(place, sweep, rows, with_png=with_png)) is not None]
    for path, text in (picture for part in parts for picture in part.pictures.items()):
        if not _is_written(path, text, lasting=False):
            break  # as on a full disk: one warning is enough
    report = "\n".join([sweep_files.report_md(sweep.name, rows), *(part.markdown for part in parts)])
    files: dict[Path, str | bytes] = {sweep.report: report, sweep.results: sweep_files.results_csv(rows)}
    for part in parts:
        files |= part.files
    return [str(path) for path, content in files.items() if _is_written(path, content)]


def _part(place: str, sweep: SweepPaths, rows: Sequence[Ranked], *, with_png: bool) -> ReportPart | None:
    """What a wing adds. A library that is missing, or has no place for its cache, costs this part and not the rest."""
    try:
        found: ReportPart = load(place)(sweep, rows, with_png=with_png)
    except (ImportError, OSError) as error:
        warn_once(f"{sweep.page} could not be made: {error}")
        return None
    return found


def _is_written(path: Path, content: str | bytes, *, lasting: bool = True) -> bool:
    try:
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            write_text_atomic(path, content, lasting=lasting)
        else:
            write_bytes_atomic(path, content, lasting=lasting)
    except OSError as error:
        warn_once(f"{path} could not be written: {error.strerror}")
        return False
    return True


def markdown(sweep: SweepPaths) -> str:
    """The tables in Markdown."""
    found = ranking.tables(ranked(sweep))
    return "\n\n".join("\n\n".join(filter(None, (name, sweep_files.markdown(one)))) for name, one in found.items())


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
