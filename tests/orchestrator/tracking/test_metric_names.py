"""docs/tracking.md lists the names and units of metrics, and everything that is logged is in it."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from points import make_config
from stub_worker import make_result, step_event

from orchestrator.tracking import names
from orchestrator.worker.measure import PHASES

PAGE = Path(__file__).parents[3] / "docs" / "tracking.md"
# How the names of metrics with a unit end.
ENDS = {
    "-": "",
    "tokens/s": "_per_second",
    "samples/s": "_per_second",
    "FLOP/s": "_flops_per_s",
    "share": "mfu",
    "ms": "_ms",
    "MiB (2^20 bytes)": "_mib",
    "MiB (2^20 bytes) a step": "_mib_per_step",
}
DTYPES = {"params": {"bf16": 1, "fp32": 1}, "grads": {"fp32": 1}, "optimizer": {"fp32": 1}}


def logged() -> set[str]:
    result = make_result(make_config(Path("outputs")))
    result["throughput"] |= {"model_flops_per_s": 1e12, "mfu": 0.4}
    result["phases_ms"] = dict.fromkeys(PHASES, 1.0)
    result["dtypes"] = DTYPES
    result["loss"] |= {"validation": 5.3, "perplexity": 200.0}
    sizes = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_predicted_bytes", "activations_predicted_bytes")
    result["memory"] |= dict.fromkeys(sizes, 1 << 20)
    found = {*names.summary_metrics(result), *names.step_metrics({"event": "validation", "step": 1, "loss": 5.3})}
    for kind in ("rss", "allocated"):
        event = step_event(1, 0) | {"memory_kind": kind, "reserved_mib": 1.0}
        found |= names.step_metrics(event).keys() | names.step_metrics({**event, "event": "ready"}).keys()
    return found


def listed() -> dict[str, str]:
    """The unit of each metric in the table of the page."""
    rows = re.findall(r"^\| `([\w/*]+)` \| (.+?) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    return dict(rows)


def test_the_page_lists_every_metric_that_is_logged_and_the_reverse() -> None:
    by_pattern = {name: [metric for metric in listed() if fnmatchcase(name, metric)] for name in logged()}
    assert [name for name, patterns in by_pattern.items() if not patterns] == []
    assert {pattern for patterns in by_pattern.values() for pattern in patterns} == set(listed())


def test_what_is_written_once_is_plain_and_a_history_has_a_group() -> None:
    once = names.summary_metrics(make_result(make_config(Path("outputs"))))
    assert [name for name in once if "/" in name] == []
    assert [name for name in names.step_metrics(step_event(1, 0)) if "/" not in name] == []


def test_a_name_ends_with_its_unit() -> None:
    for name, unit in listed().items():
        stem = re.sub(r"_(p10|p90|per_rank)$", "", name)
        assert stem.endswith(ENDS[unit]), name
        assert ENDS[unit] or not stem.endswith(tuple(filter(None, ENDS.values()))), name
