"""The prepared chart page of an experiment: speed against memory first, then the histories.

MLflow stores such a page as JSON in a tag of the experiment. The format is not public, so MLflow's version is pinned;
MLflow's default page remains one click away.
"""

from __future__ import annotations

import json
from typing import Any

KEY = "zlab"
TAG = f"mlflow.sharedViewState.{KEY}"
_SPEED, _STATES, _STEP = "summary/tokens_per_second", "summary/states_measured_mib", "summary/step_ms"
_HISTORIES = ("train/loss", "throughput/tokens_per_second", "time/step_ms")
_AXES = ["zero.stage", "precision.param", "batch.micro", "resources.ranks"]
# The values that the page itself stores for unset options. Without the "reordered" flags it sorts charts by name.
_UNCHOSEN: dict[str, Any] = {
    **{key: {} for key in ("runsExpanded", "runsVisibilityMap", "groupsExpanded")},
    **{key: [] for key in ("datasetsFilter", "runsPinned", "runsHidden")},
    **dict.fromkeys(("viewMaximized", "runListHidden"), False),
    **dict.fromkeys(("isAccordionReordered", "hideEmptyCharts", "autoRefreshEnabled"), True),
    **{"useGroupedValuesInCharts": True, "groupBy": None, "searchFilter": "", "startTime": "ALL"},
    **{"lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "runsHiddenMode": "FIRST_20_RUNS"},
    "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
}
_LINE: dict[str, Any] = {
    **dict.fromkeys(("xAxisScaleType", "scaleType"), "linear"),
    **{"xAxisKey": "step", "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [], "range": {}},
    **{"useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "ignoreOutliers": False, "lineSmoothness": 0},
}


def view() -> str:
    """The value of the tag."""
    x, y = ({"key": name, "type": "METRIC"} for name in (_STATES, _SPEED))
    charts = [
        _chart("SCATTER", "compare", "speed against model states", xaxis=x, yaxis=y),
        *(_chart("BAR", "compare", name, metricKey=name) for name in (_SPEED, _STATES)),
        _chart("PARALLEL", "compare", "settings", selectedParams=_AXES, selectedMetrics=[_STATES, _SPEED]),
        *(_chart("LINE", "run", name, metricKey=name, selectedMetricKeys=[name], **_LINE) for name in _HISTORIES),
    ]
    sections = (("compare", "Memory against speed"), ("run", "During the run"))
    flags = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    chosen = {
        "orderByKey": f"metrics.`{_SPEED}`",
        "orderByAsc": False,
        "selectedColumns": [f"params.`{axis}`" for axis in _AXES] + [f"metrics.`{name}`" for name in (_SPEED, _STEP)],
        "compareRunSections": [{"uuid": uuid, "name": name, **flags} for uuid, name in sections],
        "compareRunCharts": [{**chart, "uuid": f"zlab-{index}"} for index, chart in enumerate(charts)],
    }
    return json.dumps({**_UNCHOSEN, **chosen})


def _chart(kind: str, section: str, title: str, **more: Any) -> dict[str, Any]:
    shown = {"type": kind, "metricSectionId": section, "displayName": title, "runsCountToCompare": 20}
    return {**shown, "showAllRuns": True, "deleted": False, "isGenerated": False, **more}
