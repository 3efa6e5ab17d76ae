"""A comparison of engines in the page and in report.md: work, messages, memory, settings and pictures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.report.entry import Entry
from orchestrator.report.summary import Table
from orchestrator.report.sweep_files import markdown as table_in_markdown
from orchestrator.wings.engines import work_tables
from orchestrator.wings.engines.engine_figures import figures_of
from orchestrator.wings.engines.places import compares
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.page import rendered
from orchestrator.wings.page.report_points import ReportPoint

WORK = (
    "A row has a place if its work is that of plain PyTorch in one process: the same first weights, tokens, sequences, "
    "updates and trained parameters, states and messages in no fewer bits than the configuration asks for, and losses "
    "and norms within their bounds, in the first steps and in some after the last timed one. Columns loss and norm: "
    "the relative distance at that of the first steps which is nearest to its bound."
)
MESSAGES = (
    "What one rank sends in one steady step, counted in the same way for all engines and all transports. "
    "Volumes are those of a ring of N ranks. Ψ: the elements of all parameters."
)

BYTES = "What one rank holds between the backward of a step and its update; of ours also what it gathers and sends."


def section(points: Sequence[ReportPoint]) -> str:
    """The section of the page; empty without another engine."""
    entries = [point.entry for point in points]
    if not compares(entries):
        return ""
    told, file = work_tables.settings(entries), Path(__file__).with_name("section.html")
    return rendered(file, parts=_parts(entries), figures=figures(points), told=told)


def markdown(points: Sequence[ReportPoint], folder: str) -> list[str]:
    """The parts of report.md."""
    entries, found = [point.entry for point in points], list[str]()
    if not compares(entries):
        return []
    for title, text, table in _parts(entries):
        found += [f"## {title}", *([text] if text else []), table_in_markdown(table)]
    for figure in figures(points):
        found += [f"![{figure.picture.title}]({folder}/{figure.name}.svg)", figure.caption]
    for name, lines in work_tables.settings(entries).items():
        found += [f"## Engine {name}", "\n".join(f"- {line}" for line in lines)]
    return found


def figures(points: Sequence[ReportPoint]) -> list[Figure]:
    """The pictures for which there are numbers."""
    return figures_of(points) if compares([point.entry for point in points]) else []


def _parts(entries: Sequence[Entry]) -> list[tuple[str, str, Table]]:
    found = (
        ("The same work", WORK, work_tables.work(entries)),
        ("Messages of a step", MESSAGES, work_tables.messages(entries)),
        ("Bytes by dtype", BYTES, work_tables.dtypes(entries)),
    )
    return [(title, text, table) for title, text, table in found if table.rows]
