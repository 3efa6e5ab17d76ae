"""The profiles of a sweep in its page and its Markdown: pictures, the peak's holders, modules and traces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from orchestrator.report.summary import Table
from orchestrator.text.units import ABSENT, digits, percent, size
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.charts.canvas import inline
from orchestrator.wings.page.report_points import ReportPoint, length
from orchestrator.wings.profile.efficiency import profile_rows
from orchestrator.wings.profile.profile_figures import (
    MOST_PROFILES,
    NAMES,
    WAYS,
    ShownProfile,
    flops_text,
    place_of,
    shown_profiles,
)

MOST_MODULES = 40


def section(points: Sequence[ReportPoint]) -> str:
    """The section of the page; empty if no point has a profile."""
    found = shown_profiles(points)
    if not found:
        return ""
    more = sum(bool(point.profile) for point in points) - len(found)
    left = (
        f'<p class="muted">{more} more points have a profile; the first {MOST_PROFILES} are shown.</p>' if more else ""
    )
    return f'<section id="profiles"><h2>Profiles</h2>{left}\n{"".join(map(_profile, found))}</section>'


def figures(points: Sequence[ReportPoint]) -> list[Figure]:
    """All pictures."""
    return [figure for shown in shown_profiles(points) for figure in shown.figures]


def _profile(shown: ShownProfile) -> str:
    point = shown.point
    rows = "".join(
        f"<dt>{escape(row.name)}</dt><dd>{escape(row.text)}</dd>"
        for row in profile_rows(point.result or {})
        if row.name
    )
    figures = "".join(
        f'<figure id="{one.name}">{inline(one.picture)}<figcaption>{escape(one.caption, quote=False)}</figcaption>'
        "</figure>\n"
        for one in shown.figures
    )
    folder = Path(point.entry.folder) / "traces"
    return (
        f"<h3>{escape(point.label)}</h3><dl>{rows}</dl>\n"
        f'<div class="pictures">{figures}</div>\n'
        f"<p>At the peak, in {escape(place_of(point.profile['peak']))}:</p>{_html(holders_table(point.profile))}\n"
        f"<details><summary>Time and operations by module</summary>{_html(modules_table(point.profile))}</details>\n"
        f"<p>Traces of the ranks, for a trace viewer: <code>{escape(str(folder))}</code></p>\n"
    )


def _html(table: Table) -> str:
    kind = [
        '<{0} class="number">{1}</{0}>' if at >= table.names else "<{0}>{1}</{0}>" for at in range(len(table.header))
    ]
    head = "".join(form.format("th", escape(cell)) for form, cell in zip(kind, table.header, strict=True))
    rows = "\n".join(
        f"<tr>{''.join(form.format('td', escape(cell)) for form, cell in zip(kind, row, strict=True))}</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"


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


def modules_table(profile: Mapping[str, Any]) -> Table:
    """Time and operations of the modules, then the time that belongs to none."""
    rows = []
    for one in profile["modules"][:MOST_MODULES]:
        ms = sum(length(one[f"{way}_ms"]) for way in WAYS)
        flops = sum(length(one[f"{way}_flops"]) for way in WAYS)
        times = (digits(length(one[f"{way}_ms"])) for way in WAYS)
        rate = f"{flops_text(flops / ms * 1e3)}/s" if flops and ms else ABSENT
        rows.append((one["name"], *times, flops_text(flops) if flops else ABSENT, rate))
    for name, ms in sorted(profile["outside_ms"].items(), key=lambda one: -length(one[1])):
        rows.append((f"in no module: {name.replace('_', ' ')}", digits(length(ms)), *[ABSENT] * 4))
    return Table(("module", *(f"{way} [ms]" for way in WAYS), "operations", "rate"), tuple(rows))


def markdown(points: Sequence[ReportPoint], folder: str) -> list[str]:
    """The parts of report.md."""
    parts = []
    for shown in shown_profiles(points):
        parts.append(f"## Profile of {shown.point.label}")
        parts += [f"{row.name}: {row.text}." for row in profile_rows(shown.point.result or {}) if row.name]
        for figure in shown.figures:
            parts += [f"![{figure.picture.title}]({folder}/{figure.name}.svg)", figure.caption]
        table = holders_table(shown.point.profile)
        lines = [table.header, ("---", "---", *["---:"] * (len(table.header) - 2)), *table.rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return parts
