"""Everything that a store has of our experiments, to be compared."""

from __future__ import annotations

from typing import Any


def contents(client: Any) -> dict[str, Any]:
    """The runs of each experiment by name, with their tags, parameters, all values of their metrics and artifacts."""
    found: dict[str, Any] = {}
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            found[f"{experiment.name}: {run.info.run_name} {run.info.run_id}"] = {
                "status": run.info.status,
                "ended": run.info.end_time,
                "tags": {key: value for key, value in run.data.tags.items() if "note" not in key},
                "params": run.data.params,
                "metrics": {key: history(client, run, key) for key in run.data.metrics},
                "artifacts": sorted(one.path for one in client.list_artifacts(run.info.run_id)),
            }
    return found


def history(client: Any, run: Any, metric: str) -> list[tuple[int, float, int]]:
    values = client.get_metric_history(run.info.run_id, metric)
    return sorted((one.step, one.value, one.timestamp) for one in values)
