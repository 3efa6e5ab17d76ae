"""The report of a sweep as one HTML file that needs nothing else, and its pictures in Markdown. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from orchestrator.report import cautions, named_apart, ranking
from orchestrator.text.paths import program
from orchestrator.text.streams import one_line
from orchestrator.text.units import count, many
from orchestrator.wings import REPORT_SECTIONS, load
from orchestrator.wings.page import checks, page_details, page_table
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.charts.canvas import inline, variables
from orchestrator.wings.page.charts.palette import DARK, LIGHT
from orchestrator.wings.page.figures import settings_of
from orchestrator.wings.page.report_points import ReportPoint, group_of, is_finite
from orchestrator.wings.page.scaling import baseline_text

# A browser that opens the page may run its own script and use its own styles, and may ask for nothing, so that a page
# that is sent on tells nobody who reads it. The empty icon keeps a server from being asked for one.
LONG_WARNING = 320  # letters
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(name: str, points: Sequence[ReportPoint], figures: Sequence[Figure], facts: Mapping[str, Any]) -> str:
    """The page. facts: the record of the sweep."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(name)}</title><link rel="icon" href="data:,">
<style>{_themes()}
{_file("page.css")}</style></head>
<body><button id="theme" type="button">theme: as the system</button>
<h1>{escape(name)}</h1>
{_head(points, facts)}
<section id="answer"><h2>Answer</h2>
{_answer(points)}</section>
<section id="pictures"><h2>Pictures</h2><div class="pictures">
{"".join(map(_figure, figures))}</div></section>
<section id="all-points"><h2>All points</h2>
{page_table.table(points, settings_of(points))}</section>
{"".join(load(place).section(points) for place in REPORT_SECTIONS)}
{_left_out(points)}
<section id="environment"><h2>Environment</h2>
{page_details.listed(page_details.environment(points)) or "<p>Nothing was measured.</p>"}</section>
<section id="commands"><h2>Commands and settings</h2>
{page_details.details(points)}</section>
<script>{_file("page.js")}</script></body></html>
"""


@cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _themes() -> str:
    """The colours: light, dark where the system or the button says so, and light on paper."""
    light, dark = variables(LIGHT), variables(DARK)
    by_system = f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    by_button = f":root[data-theme=dark]{{{dark}color-scheme:dark}}:root[data-theme=light]{{color-scheme:light}}"
    return f":root{{{light}}}{by_system}{by_button}@media print{{:root:root:root{{{light}}}}}"


def _head(points: Sequence[ReportPoint], facts: Mapping[str, Any]) -> str:
    states = Counter(point.entry.state for point in points)
    counted = ", ".join(f"{number} {state}" for state, number in states.items())
    command = facts.get("command")
    typed = f"<pre>{escape(f'{program()} {shlex.join(command)}')}</pre>" if command else ""
    work = f'<p class="muted">{escape(_work(points))}</p>'
    return f"<p>{many(len(points), 'point')}: {escape(counted)}</p>{work}{typed}"


def _work(points: Sequence[ReportPoint]) -> str:
    """What the points did, where all of them did the same: the model, the batch, the machine and the method."""
    measured = [point.result for point in points if point.result is not None]
    texts = [[text(result) for result in measured] for text in (_model, _batch, _machine, _method)]
    return "; ".join(told[0] if len(set(told)) == 1 else f"{told[0]} and others" for told in texts if told)


def _model(result: Mapping[str, Any]) -> str:
    model = group_of(result, "model")
    numel = model.get("parameters")
    return f"{model.get('name')}, {count(numel if is_finite(numel) else None)} parameters"


def _batch(result: Mapping[str, Any]) -> str:
    return f"{result['batch']['tokens_per_step']:,} tokens a step"


def _machine(result: Mapping[str, Any]) -> str:
    environment = group_of(result, "environment")
    return f"{result['world']} x {result['device']}, {environment.get('gpu') or environment.get('cpu') or 'unknown'}"


def _method(result: Mapping[str, Any]) -> str:
    speed = result["throughput"]
    return f"{speed['steps_counted']} steps counted after {speed['warmup_steps']} of warm-up"


def _answer(points: Sequence[ReportPoint]) -> str:
    rows = [point.ranked for point in points]
    lines = [
        f'<p class="answer">{escape(_sentence(ranking.conclusion(rows)))}</p>',
        *(f'<p class="answer">{escape(_sentence(line))}</p>' for line in named_apart.lines(rows)),
        f"<p>Rule: {escape(ranking.rule(rows[0].metric if rows else ranking.DEFAULT_METRIC))}.</p>",
        f"<p>Baselines: {escape(baseline_text(points))}.</p>",
        *(f"<p>{escape(_sentence(line))}.</p>" for line in cautions.reused(rows)),
        *(_warning(one_line(line)) for line in (*cautions.warnings(rows), *checks.warnings(points))),
    ]
    return "\n".join(lines)


def _warning(text: str) -> str:
    """A warning; of one that names many points, the beginning, to unfold."""
    inside = f"<b>Warning:</b> {escape(text)}"
    if len(text) > LONG_WARNING:
        start = f"<b>Warning:</b> {escape(text[:LONG_WARNING])}…"
        inside = f"<details><summary>{start}</summary><p>{escape(text)}</p></details>"
    return f'<div class="warning">{inside}</div>'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _figure(figure: Figure) -> str:
    caption = escape(figure.caption, quote=False)
    return f'<figure id="{figure.name}">{inline(figure.picture)}<figcaption>{caption}</figcaption></figure>\n'


def _left_out(points: Sequence[ReportPoint]) -> str:
    """The points without a result, with their reasons; nothing if all have one."""
    lost = [point for point in points if point.result is None]
    if not lost:
        return ""
    rows = "\n".join(
        f"<tr><td>{escape(point.label)}</td><td>{escape(point.entry.state)}</td>"
        f'<td class="long">{escape(one_line(point.entry.message) or "no reason known")}</td></tr>'
        for point in lost
    )
    head = "<tr><th>point</th><th>state</th><th>reason</th></tr>"
    return f"""<section id="without-result"><h2>Points without a result</h2>
<table><thead>{head}</thead><tbody>
{rows}
</tbody></table></section>"""


def markdown(points: Sequence[ReportPoint], figures: Sequence[Figure], folder: str) -> str:
    """The part of report.md after the table: warnings, the pictures, which are files in `folder`, and the machine."""
    parts = [f"Warning: {one_line(line)}" for line in checks.warnings(points)]
    parts += ["## Pictures"] if figures else []
    for figure in figures:
        parts.append(f"![{figure.picture.title}]({folder}/{figure.name}.svg)")
        parts.append(figure.caption)
    for place in REPORT_SECTIONS:
        parts += load(place).markdown(points, folder)
    if made := page_details.environment(points):
        lines = [f"- {name}: {text}" for name, text in {"work": _work(points), **made}.items()]
        parts += ["## Environment", "\n".join(lines)]
    return "\n\n".join(parts) + "\n" if parts else ""
