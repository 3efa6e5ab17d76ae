"""The profiles of a sweep in its page and its Markdown: pictures, the peak's holders, modules and traces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.report import sweep_files
from orchestrator.report.summary import Table
from orchestrator.text.units import ABSENT, percent, size
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.page import rendered
from orchestrator.wings.page.report_points import ReportPoint, length
from orchestrator.wings.profile.efficiency import profile_rows
from orchestrator.wings.profile.profile_figures import (
    MOST_PROFILES,
    NAMES,
    ShownProfile,
    place_of,
    shown_profiles,
)


def section(points: Sequence[ReportPoint]) -> str:
    """The section of the page; empty if no point has a profile."""
    found = shown_profiles(points)
    if not found:
        return ""
    return rendered(
        Path(__file__).with_name("section.html"),
        more=sum(bool(point.profile) for point in points) - len(found),
        most=MOST_PROFILES,
        profiles=list(map(_profile, found)),
    )


def figures(points: Sequence[ReportPoint]) -> list[Figure]:
    """All pictures."""
    return [figure for shown in shown_profiles(points) for figure in shown.figures]


def _profile(shown: ShownProfile) -> dict[str, Any]:
    point = shown.point
    return {
        "label": point.label,
        "rows": [row for row in profile_rows(point.result or {}) if row.name],
        "figures": shown.figures,
        "place": place_of(point.profile["peak"]),
        "holders": holders_table(point.profile),
        "folder": str(Path(point.entry.folder) / "traces"),
    }


def holders_table(profile: Mapping[str, Any]) -> Table:
    """What holds memory at the peak, the largest first."""
    peak = profile["peak"]
    total = length(peak["bytes"])
    rows = [
        (
            NAMES.get(one["component"], one["component"]),
            one["name"] or ABSENT,
            size(length(one["bytes"])),
            percent(length(one["bytes"]), total),
            f"{one['tensors']:,}",
            size(length(one["largest_bytes"])),
        )
        for one in peak["holders"]
    ]
    rest = total - sum(length(one["bytes"]) for one in peak["holders"])
    if rest > 0:
        rows.append(("all others", ABSENT, size(rest), percent(rest, total), ABSENT, ABSENT))
    return Table(("component", "module or unit", "bytes", "share", "tensors", "largest"), tuple(rows), names=2)


def markdown(points: Sequence[ReportPoint], folder: str) -> list[str]:
    """The parts of report.md."""
    parts = []
    for shown in shown_profiles(points):
        parts.append(f"## Profile of {shown.point.label}")
        parts += [f"{row.name}: {row.text}." for row in profile_rows(shown.point.result or {}) if row.name]
        for figure in shown.figures:
            parts += [f"![{figure.picture.title}]({folder}/{figure.name}.svg)", figure.caption]
        parts.append(sweep_files.markdown(holders_table(shown.point.profile)))
    return parts
