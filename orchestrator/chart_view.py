"""The prepared chart page of an experiment: speed beside memory first, then the histories.

MLflow keeps such a page as JSON in a tag of the experiment. The format is not public: MLflow is pinned, and where
a page is not understood the dashboard shows its own.
"""

from __future__ import annotations

import json
from typing import Any

KEY = "zlab"
TAG = f"mlflow.sharedViewState.{KEY}"
_SPEED, _STATES, _STEP = "summary/tokens_per_second", "summary/states_measured_mib", "summary/step_ms"
_HISTORIES = ("train/loss", "throughput/tokens_per_second", "time/step_ms")
_AXES = ["zero.stage", "precision.param", "batch.micro", "resources.ranks"]


def view() -> str:
    """The tag's value."""
    charts = [
        _chart(0, "SCATTER", "compare", xaxis=_metric(_STATES), yaxis=_metric(_SPEED)),
        _chart(1, "BAR", "compare", metricKey=_SPEED),
        _chart(2, "BAR", "compare", metricKey=_STATES),
        _chart(3, "PARALLEL", "compare", selectedParams=_AXES, selectedMetrics=[_STATES, _SPEED], showAllRuns=True),
    ]
    charts += [_line(4 + index, name) for index, name in enumerate(_HISTORIES)]
    sections = [_section("compare", "Memory against speed"), _section("history", "During the run")]
    columns = [*(f"params.`{axis}`" for axis in _AXES), *(f"metrics.`{one}`" for one in (_SPEED, _STEP, _STATES))]
    state: dict[str, Any] = {
        "orderByKey": f"metrics.`{_SPEED}`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "isAccordionReordered": True,  # without it sections are sorted by name
        "hideEmptyCharts": True,
        "autoRefreshEnabled": True,
        "runsHiddenMode": "FIRST_20_RUNS",
        "compareRunSections": sections,
        "compareRunCharts": charts,
    }
    return json.dumps(state | _EMPTY)


# The page fails on a view that lacks one of these.
_EMPTY: dict[str, Any] = {
    "searchFilter": "",
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "datasetsFilter": [],
    "modelVersionFilter": "All Runs",
    "runsExpanded": {},
    "runsPinned": [],
    "runsHidden": [],
    "runsVisibilityMap": {},
    "viewMaximized": False,
    "runListHidden": False,
    "useGroupedValuesInCharts": True,
    "groupBy": None,
    "groupsExpanded": {},
    "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
}


def _chart(index: int, kind: str, section: str, **more: Any) -> dict[str, Any]:
    shown = {"uuid": f"zlab-{index}", "type": kind, "metricSectionId": section, "runsCountToCompare": 20}
    return {**shown, "deleted": False, "isGenerated": False, "displayName": "", **more}


def _line(index: int, name: str) -> dict[str, Any]:
    scales = {"xAxisScaleType": "linear", "scaleType": "linear", "range": {}, "lineSmoothness": 0}
    axes = {"xAxisKey": "step", "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": []}
    globals_ = {"useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "ignoreOutliers": False}
    return _chart(index, "LINE", "history", metricKey=name, selectedMetricKeys=[name], **scales, **axes, **globals_)


def _section(name: str, title: str) -> dict[str, Any]:
    return {
        "uuid": name,
        "name": title,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }


def _metric(name: str) -> dict[str, str]:
    return {"key": name, "type": "METRIC"}
