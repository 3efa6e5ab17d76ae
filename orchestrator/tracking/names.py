"""The names of a run's data in MLflow: experiments, parameters, metrics with units in their names, and tags.

A metric that is written once, at the end, is plain, such as tokens_per_second: MLflow cuts titles after about ten
letters, and draws plain names together. A history has a group, such as train/loss. docs/tracking.md lists every metric;
a test compares it with what is logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any

from orchestrator.records.run_record import store_path

MIB = 2**20
PARAM_LIMIT = 6000
QUOTED = "%3F"  # a "?" in the path of an address
OUTCOME, SWEEP, POINT, KIND = "zlab.outcome", "zlab.sweep", "zlab.point", "zlab.kind"
ATTEMPT, HOST, PID, STARTED = "zlab.attempt", "zlab.host", "zlab.pid", "zlab.pid_started"
KEPT = "zlab.kept"
COLOUR = "mlflow.runColor"  # without it, MLflow takes one by the run's id, the same one for several runs
SPEED, STEP, PEAK, STATES, LOSS = "tokens_per_second", "step_ms", "peak_mib", "states_measured_mib", "loss_last"
COMMAND, COUNTS, RANK_BY, BEST = "zlab.command", "zlab.points", "zlab.rank_by", "zlab.best"
NOTE = "mlflow.note.content"  # Markdown that MLflow shows above a run and an experiment
# MLflow has three final states. A point that does not fit in memory is an answer, not a failure.
STATUS = {
    **dict.fromkeys(("ok", "tight", "oom", "oom_host"), "FINISHED"),
    **dict.fromkeys(("error", "hang", "timeout"), "FAILED"),
    **dict.fromkeys(("preempted", "cancelled", "lost"), "KILLED"),
}


def local_uri(output: str | Path) -> str:
    """The address of the tracking store next to the outputs. SQLAlchemy cuts the address at "?", and may decode "%".

    No other character is quoted: MLflow creates the folders of the address literally, so that a quoted address would
    leave empty folders.
    """
    path = str(store_path(output))
    return f"sqlite:///{(path.replace('%', '%25') if decodes() else path).replace('?', QUOTED)}"


@cache
def decodes() -> bool:
    """Whether the installed SQLAlchemy decodes the path of an address: 2.1 does, which needs Python 3.11, 2.0 not."""
    return tuple(map(int, metadata.version("sqlalchemy").split(".")[:2])) >= (2, 1)


def params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The leaves of the configuration, with dotted names such as zero.stage and precision.param."""
    leaves: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            leaves |= params(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = str(value)[:PARAM_LIMIT]
    return leaves


def step_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """The values that one event of metrics.jsonl adds to the histories."""
    if event["event"] == "validation":
        return finite({"validation/loss": event["loss"]})
    kind, mib, reserved = map(event.get, ("memory_kind", "memory_mib", "reserved_mib"))
    if event["event"] != "step":  # of those that name memory: before the first step
        return finite({f"memory/loaded_{kind}_mib": mib, "memory/loaded_reserved_mib": reserved})
    return finite(
        {
            "train/loss": event["loss"],
            "train/learning_rate": event["lr"],
            "train/grad_norm": event["grad_norm"],
            "throughput/tokens_per_second": event["tokens_per_second"],
            "time/step_ms": event["step_ms"],
            f"memory/{kind}_mib": mib,
            "memory/reserved_mib": reserved,
        }
    )


def summary_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Metrics that are logged once, so that MLflow draws them as bars."""
    speed, memory, losses = result["throughput"], result["memory"], result["loss"]
    values: dict[str, Any] = {
        SPEED: speed["tokens_per_second"]["median"],
        "tokens_per_second_p10": speed["tokens_per_second"]["p10"],
        "tokens_per_second_p90": speed["tokens_per_second"]["p90"],
        "tokens_per_second_per_rank": speed["tokens_per_second_per_rank"],
        "samples_per_second": speed.get("samples_per_second"),
        "model_flops_per_s": speed.get("model_flops_per_s"),
        "mfu": speed.get("mfu"),
        STEP: speed["step_ms"]["median"],
        "loss_first": losses["first"],
        LOSS: losses["last"],
        "loss_validation": losses.get("validation"),
        "perplexity": losses.get("perplexity"),
        "activations_mib": _mib(memory["activations_bytes"]),
        "activations_predicted_mib": _mib(memory.get("activations_predicted_bytes")),
        PEAK: _mib(memory.get("peak_rss_bytes") if (held := memory.get("peak_allocated_bytes")) is None else held),
        "peak_predicted_mib": _mib(memory.get("peak_predicted_bytes")),
        "other_tensors_mib": _mib(memory["other_tensors_bytes"]),
        "sent_mib_per_step": _mib(sum(volume["bytes"] for volume in result["communication"]["data"].values())),
    }
    values |= {f"{phase}_ms": value for phase, value in result["phases_ms"].items()}
    for kind in ("rss", "allocated", "reserved"):
        values[f"peak_{kind}_mib"] = _mib(memory.get(f"peak_{kind}_bytes"))
    for which in ("measured", "predicted"):
        total = 0
        for state in memory["states"]:
            total += state[f"{which}_bytes"] or 0
            values[f"{state['component']}_{which}_mib"] = _mib(state[f"{which}_bytes"])
        values[f"states_{which}_mib"] = _mib(total)
    for component, amounts in (result.get("dtypes") or {}).items():
        values |= {f"{component}_{dtype}_mib": _mib(count_bytes) for dtype, count_bytes in amounts.items()}
    return finite(values)


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Drops values that are None or not finite: MLflow returns an infinity as 1.8e308."""
    return {name: float(value) for name, value in values.items() if value is not None and isfinite(value)}


def _mib(count_bytes: float | None) -> float | None:
    return None if count_bytes is None else count_bytes / MIB
