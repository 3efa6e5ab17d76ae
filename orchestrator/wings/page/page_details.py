"""What the page folds away: the environment, and the command, folder and configuration of each point. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from orchestrator.report.summary import run_command, training_rows
from orchestrator.text.streams import one_line
from orchestrator.text.units import ABSENT
from orchestrator.wings.page.report_points import ReportPoint, group_of

UNSHOWN = ("output", "tracking")  # of the configuration: where a run is recorded
NAMED = 6


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The settings of a configuration by dotted name, with values as they are typed."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


def shared(several: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all of them say alike."""
    if not several:
        return {}
    first, *others = several
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def environment_of(point: ReportPoint) -> dict[str, str]:
    """The machine, the versions and the code of a measured point, by their names."""
    result, made = point.result or {}, point.provenance
    environment = group_of(result, "environment")
    chip = environment.get("gpu") or environment.get("cpu")
    commit = made.get("commit") or environment.get("git")
    changed = " with uncommitted changes (git.diff in its folder)" if made.get("dirty") else ""
    packages = {f"package {name}": version for name, version in group_of(made, "packages").items()}
    variables = group_of(made, "variables") or group_of(environment, "variables")
    found = {
        "ranks": f"{result.get('world')} x {result.get('device')}, {result.get('backend')}",
        "device": chip,
        "threads of a rank": environment.get("threads_per_rank"),
        "host": environment.get("host"),
        "kernel": made.get("kernel"),
        "python": environment.get("python"),
        "torch": environment.get("torch"),
        "code": f"{commit}{changed}" if commit else None,
        **packages,
        **{f"variable {name}": value for name, value in variables.items()},
    }
    return {name: one_line(str(value)) for name, value in found.items() if value is not None}


def environment(points: Sequence[ReportPoint]) -> dict[str, str]:
    """What all measured points share, and after it what differs between them, with the points of each value."""
    measured = [point for point in points if point.result is not None]
    several = [environment_of(point) for point in measured]
    found = shared(several)
    for name in dict.fromkeys(key for one in several for key in one if key not in found):
        groups: dict[str, list[str]] = {}
        for point, one in zip(measured, several, strict=True):
            groups.setdefault(one.get(name, "not recorded"), []).append(point.label)
        found[f"{name} differs"] = "; ".join(f"{value}: {_few(labels)}" for value, labels in groups.items())
    return found


def _few(labels: Sequence[str]) -> str:
    more = len(labels) - NAMED
    return ", ".join(labels[:NAMED]) + (f" and {more} more" if more > 0 else "")


def details(points: Sequence[ReportPoint]) -> str:
    """The settings that all points share, then each point with its own, as HTML."""
    configs = {point.number: _shown(point.entry.config) for point in points if point.entry.config}
    common = shared(list(configs.values()))
    same = f"<details><summary>{len(common)} settings that all points share</summary>{listed(common)}</details>"
    return same + "\n" + "\n".join(_point(point, configs.get(point.number, {}), common) for point in points)


def _shown(config: Mapping[str, Any]) -> dict[str, str]:
    return leaves({key: value for key, value in config.items() if key not in UNSHOWN})


def _point(point: ReportPoint, config: Mapping[str, str], common: Mapping[str, str]) -> str:
    own = {key: value for key, value in config.items() if key not in common}
    reason = f"<p>{escape(one_line(point.entry.message))}</p>" if point.entry.message else ""
    folder = escape(point.entry.folder) or ABSENT
    return (
        f'<details id="point-{point.number}"><summary>{escape(f"{point.place} {point.label}".strip())} '
        f'<span class="muted">{escape(point.entry.state)}</span></summary>{reason}'
        f"<pre>{escape(run_command(point.entry.overrides))}</pre>"
        f"<p>records: <code>{folder}</code></p>{_trained(point.result or {})}{listed(own)}</details>"
    )


def _trained(result: Mapping[str, Any]) -> str:
    """How far a training to an end came, and its examples; empty for another run."""
    rows = training_rows(result)
    told = "".join(f"<dt>{escape(row.name)}</dt><dd>{escape(one_line(row.text))}</dd>" for row in rows)
    return f'<dl class="trained">{told}</dl>' if rows else ""


def listed(texts: Mapping[str, str]) -> str:
    """Names and texts as HTML; empty for none."""
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(one_line(value))}</dd>" for key, value in texts.items())
    return f"<dl>{rows}</dl>" if rows else ""
