"""All pictures of a report, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.varied import Varied, key_of, varied_keys, varied_settings
from orchestrator.wings.page import bar_figures, plane_figures
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.report_points import ReportPoint


def settings_of(points: Sequence[ReportPoint]) -> list[Varied]:
    """The settings that vary between the points, with their values in the order of the points."""
    order = sorted(range(len(points)), key=lambda number: points[number].planned_at)
    # A row without a place may be a reference, which is made otherwise than all others.
    rivals = [point.entry.overrides for point in points if not point.ranked.apart]
    typed = [point.entry.overrides for point in points]
    keys = varied_keys(rivals if len(rivals) > 1 else typed)
    return varied_settings([[word for word in words if key_of(word) in keys] for words in typed], order)


def figures_of(points: Sequence[ReportPoint]) -> list[Figure]:
    """The pictures for which there are numbers; none for no points."""
    if not points:
        return []
    found = (
        bar_figures.speed(points),
        bar_figures.memory(points),
        plane_figures.speed_and_memory(points, settings_of(points)),
        bar_figures.phases(points),
        bar_figures.sent(points),
        plane_figures.learning(points),
        plane_figures.scaling(points),
    )
    return [figure for figure in found if figure is not None]
