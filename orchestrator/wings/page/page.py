"""The report of a sweep as one HTML file that needs nothing else, and its pictures in Markdown. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.report import cautions, named_apart, ranking
from orchestrator.text.paths import program
from orchestrator.text.streams import one_line
from orchestrator.text.units import ABSENT, count, grouped, many
from orchestrator.wings import REPORT_SECTIONS, load
from orchestrator.wings.page import checks, page_details, page_table
from orchestrator.wings.page.bar_figures import Figure
from orchestrator.wings.page.charts.canvas import inline, variables
from orchestrator.wings.page.charts.palette import DARK, LIGHT
from orchestrator.wings.page.figures import settings_of
from orchestrator.wings.page.report_points import ReportPoint, group_of, is_finite
from orchestrator.wings.page.scaling import baseline_text

HERE = Path(__file__).parent
# A browser that opens the page may run its own script and use its own styles, and may ask for nothing, so that a page
# that is sent on tells nobody who reads it. The empty icon keeps a server from being asked for one.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
LONG_WARNING = 320  # letters; of a longer one the beginning is shown, to unfold


@cache
def _templates() -> Any:
    import jinja2

    loaded = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    loaded.filters |= {"one_line": one_line, "shown": shown}
    return loaded


def rendered(template: Path, **values: Any) -> str:
    """The text of a template with these values, which are escaped unless they are of the type Markup."""
    from markupsafe import Markup

    return Markup(_templates().from_string(template.read_text(encoding="utf-8")).render(**values))


def shown(figure: Figure) -> str:
    """A picture with its caption."""
    from markupsafe import Markup, escape

    caption = escape(figure.caption)
    drawn = Markup(inline(figure.picture))
    return Markup('<figure id="{}"><div class="picture">{}</div><figcaption>{}</figcaption></figure>').format(
        figure.name, drawn, caption
    )


def page(name: str, points: Sequence[ReportPoint], figures: Sequence[Figure], facts: Mapping[str, Any]) -> str:
    """The page. facts: the record of the sweep."""
    from markupsafe import Markup

    rows = [point.ranked for point in points]
    states = Counter(page_table.state_of(point) for point in points)
    common, details = page_details.details(points)
    command, columns = facts.get("command"), page_table.columns(points, settings_of(points))
    metric = rows[0].metric if rows else ranking.DEFAULT_METRIC
    style = _themes() + (HERE / "page.css").read_text(encoding="utf-8")
    return str(
        rendered(
            HERE / "page.html",
            name=name,
            policy=Markup(POLICY),
            style=Markup(style),
            script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
            counted=f"{many(len(points), 'point')}: {', '.join(f'{n} {state}' for state, n in states.items())}",
            work=_work(points),
            command=f"{program()} {shlex.join(command)}" if command else "",
            answers=list(map(_sentence, (ranking.conclusion(rows), *named_apart.lines(rows)))),
            notes=[
                f"Rule: {ranking.rule(metric)}",
                f"Baselines: {baseline_text(points)}",
                *map(_sentence, (*cautions.reused(rows), *cautions.without_place(rows))),
            ],
            warnings=list(map(one_line, (*cautions.warnings(rows), *checks.warnings(points)))),
            longest=LONG_WARNING,
            figures=figures,
            states=list(states),
            tables=grouped((point.ranked.table, point) for point in points) or {"": []},
            columns=columns,
            sections=[load(place).section(points) for place in REPORT_SECTIONS],
            lost=[point for point in points if point.result is None],
            environment=page_details.environment(points),
            absent=ABSENT,
            common=common,
            details=details,
        )
    )


def _themes() -> str:
    """The colours: light, dark where the system or the button says so, and light on paper."""
    light, dark = variables(LIGHT), variables(DARK)
    by_system = f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
    by_button = f":root[data-theme=dark]{{{dark}color-scheme:dark}}:root[data-theme=light]{{color-scheme:light}}"
    return f":root{{{light}}}{by_system}{by_button}@media print{{:root:root:root{{{light}}}}}\n"


def _work(points: Sequence[ReportPoint]) -> str:
    """What the points did, where all of them did the same: the model, the batch, the machine and the method."""
    measured = [point.result for point in points if point.result is not None and not point.ranked.apart]
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


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


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
