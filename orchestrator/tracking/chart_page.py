"""The prepared chart page of an experiment or of a sweep in it: speed and memory, the settings, then the histories.

MLflow stores such a page as JSON in a tag of the experiment. The format is not public, so MLflow's version is pinned;
MLflow's default page remains one click away.
"""

from __future__ import annotations

import colorsys
import json
from collections.abc import Sequence
from typing import Any

from orchestrator.tracking import names

KEY = "zlab"
_BARS = (names.SPEED, names.PEAK, names.STATES, names.LOSS)
_HISTORIES = (
    *("train/loss", "throughput/tokens_per_second", "time/step_ms"),
    *("memory/allocated_mib", "memory/rss_mib", "validation/loss"),
)
_AXES = ("zero.stage", "precision.param", "batch.micro", "resources.ranks")  # of runs that are in no sweep
MOST_AXES = 6  # more have no room for their titles
MOST_RUNS = 200
# A bar with its number needs this height to be read, in pixels; and what is around the bars of a card.
_BAR_PX, _AROUND_PX, _CARD_PX = 21, 130, 360
# The values that the page itself stores for unset options. Without the "reordered" flags it sorts charts by name.
_UNCHOSEN: dict[str, Any] = {
    **{key: {} for key in ("runsExpanded", "runsVisibilityMap", "groupsExpanded")},
    **{key: [] for key in ("datasetsFilter", "runsPinned", "runsHidden")},
    **dict.fromkeys(("viewMaximized", "runListHidden"), False),
    **dict.fromkeys(("isAccordionReordered", "hideEmptyCharts", "autoRefreshEnabled"), True),
    **{"useGroupedValuesInCharts": True, "groupBy": None, "startTime": "ALL"},
    **{"lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "runsHiddenMode": "SHOWALL"},
    "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
}
# Of Okabe and Ito, which colour-blind people can tell apart, with grey for black; then hues by the golden ratio.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8c959f", "#f0e442")
_LINE: dict[str, Any] = {
    **dict.fromkeys(("xAxisScaleType", "scaleType"), "linear"),
    **{"xAxisKey": "step", "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [], "range": {}},
    **{"useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "ignoreOutliers": False, "lineSmoothness": 0},
}


def key_of(sweep: str) -> str:
    """The key of a sweep's page, which its address contains; without a sweep, of the experiment's."""
    return f"{KEY}-{sweep}" if sweep else KEY


def tag_of(sweep: str) -> str:
    """The tag that has a sweep's page; without a sweep, the experiment's."""
    return f"mlflow.sharedViewState.{key_of(sweep)}"


def colour_of(number: int) -> str:
    """The colour of a sweep's point in every chart, by its number from 0: another one for each."""
    if number < len(_COLOURS):
        return _COLOURS[number]
    red, green, blue = colorsys.hls_to_rgb(number * 0.618034 % 1, (0.35, 0.5, 0.65)[number % 3], 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def view(settings: Sequence[str] = (), sweep: str = "", points: int = 0) -> str:
    """The value of the tag: the page of all points in the experiment, or with `sweep` of that sweep's.

    settings: the parameters that are axes and columns; without any, those of most interest. points: how many runs the
    cards have room for.
    """
    settings = settings or _AXES
    axes = list(settings[:MOST_AXES])
    pair = [names.PEAK, names.SPEED]
    x, y = ({"key": name, "type": "METRIC"} for name in pair)
    charts = [
        *(_chart("BAR", "compare", name, metricKey=name) for name in _BARS),
        _chart("SCATTER", "trade", "speed against peak memory", xaxis=x, yaxis=y),
        _chart("PARALLEL", "settings", "settings", selectedParams=axes, selectedMetrics=pair),
        *(_chart("LINE", "run", name, metricKey=name, selectedMetricKeys=[name], **_LINE) for name in _HISTORIES),
    ]
    # In cards of a third of a screen the tool bar has two rows, which cover the first bar.
    sections = [
        _section("compare", "Speed, memory and loss", 2, max(_CARD_PX, _AROUND_PX + points * _BAR_PX)),
        _section("trade", "Speed against memory", 1, _CARD_PX + 60),
        _section("settings", "Settings", 1, _CARD_PX + 60),
        _section("run", "During the run", 2, _CARD_PX),
    ]
    wanted = {names.KIND: "point", **({names.SWEEP: sweep} if sweep else {})}
    columns = [*(f"params.`{axis}`" for axis in settings), *(f"metrics.`{name}`" for name in (*_BARS, names.STEP))]
    chosen = {
        "searchFilter": " and ".join(f"tags.`{key}` = '{value}'" for key, value in wanted.items()),
        "orderByKey": f"metrics.`{names.SPEED}`",
        "orderByAsc": False,
        "selectedColumns": [*columns, f"tags.`{names.OUTCOME}`", f"tags.`{names.KEPT}`"],
        "compareRunSections": sections,
        "compareRunCharts": [{**chart, "uuid": f"zlab-{index}"} for index, chart in enumerate(charts)],
    }
    return json.dumps({**_UNCHOSEN, **chosen})


def _section(uuid: str, name: str, columns: int, height: int) -> dict[str, Any]:
    flags = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    return {"uuid": uuid, "name": name, **flags, "columns": columns, "cardHeight": height}


def _chart(kind: str, section: str, title: str, **more: Any) -> dict[str, Any]:
    shown = {"type": kind, "metricSectionId": section, "displayName": title, "runsCountToCompare": MOST_RUNS}
    return {**shown, "showAllRuns": True, "deleted": False, "isGenerated": False, **more}
