"""The files that this wing adds to the report of a sweep: report.html, its pictures, and report.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report.comparison import ReportPart
from orchestrator.report.ranking import Ranked
from orchestrator.wings import REPORT_SECTIONS, load
from orchestrator.wings.page import page
from orchestrator.wings.page.charts import canvas
from orchestrator.wings.page.figures import figures_of
from orchestrator.wings.page.report_points import facts_of, points_of

PNG_FACTOR = 1.5  # pixels of report.png for one of the pictures, so that text stays sharp when it is enlarged
PNG_MORE = 2  # of the pictures of other wings, those of the first point


def part(sweep: SweepPaths, rows: Sequence[Ranked], *, with_png: bool) -> ReportPart:
    """What is written. with_png: also report.png, which takes longer."""
    points = points_of(sweep, rows)
    drawn = figures_of(points)
    more = [figure for place in REPORT_SECTIONS for figure in load(place).figures(points)]
    pictures = {sweep.pictures / f"{one.name}.svg": canvas.document(one.picture) for one in [*drawn, *more]}
    files: dict[Path, str | bytes] = {sweep.page: page.page(sweep.name, points, drawn, facts_of(sweep))}
    if with_png:
        shown = [figure.picture for figure in [*drawn, *more[:PNG_MORE]]]
        files[sweep.picture] = canvas.png(shown, PNG_FACTOR)
    return ReportPart(page.markdown(points, drawn, sweep.pictures.name), pictures, files)
