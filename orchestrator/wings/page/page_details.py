"""What the page folds away: the environment, and the command, folder and configuration of each point. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.report.changes import flat
from orchestrator.report.summary import run_command, training_rows
from orchestrator.text.streams import one_line
from orchestrator.text.units import grouped
from orchestrator.wings.page.report_points import ReportPoint, group_of, some_of

UNSHOWN = ("output", "tracking")  # of the configuration: where a run is recorded


class PointDetails(NamedTuple):
    """A point as the page unfolds it. trained: how far a training to an end came, and its examples. own: the settings
    that not all points have."""

    point: ReportPoint
    title: str
    command: str
    trained: Mapping[str, str]
    own: Mapping[str, str]


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
        "gloo because": result.get("backend_reason") or None,
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
        told = zip(measured, several, strict=True)
        groups = grouped((one.get(name, "not recorded"), point.label) for point, one in told)
        found[f"{name} differs"] = "; ".join(f"{value}: {some_of(labels)}" for value, labels in groups.items())
    return found


def details(points: Sequence[ReportPoint]) -> tuple[dict[str, str], list[PointDetails]]:
    """The settings that all points share, and each point with its own."""
    configs = {point.number: _shown(point.entry.config) for point in points if point.entry.config}
    common = shared(list(configs.values()))
    return common, [_details(point, configs.get(point.number, {}), common) for point in points]


def _shown(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a configuration by dotted name, with values as they are typed."""
    settings = flat({key: value for key, value in config.items() if key not in UNSHOWN})
    return {key: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for key, one in settings.items()}


def _details(point: ReportPoint, config: Mapping[str, str], common: Mapping[str, str]) -> PointDetails:
    return PointDetails(
        point,
        f"{point.place} {point.label}".strip(),
        run_command(point.entry.overrides),
        {row.name: row.text for row in training_rows(point.result or {})},
        {key: value for key, value in config.items() if key not in common},
    )
