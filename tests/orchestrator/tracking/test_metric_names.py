"""The names and units of metrics are a list that changes only on purpose, and everything that is logged is in it."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from points import make_config
from stub_worker import make_result, step_event

from orchestrator.tracking import names
from orchestrator.worker.measure import PHASES

GOLDEN = Path(__file__).with_name("metric_names.txt")
PAGE = Path(__file__).parents[3] / "docs" / "tracking.md"
DTYPES = {"params": {"bf16": 1, "fp32": 1}, "grads": {"fp32": 1}, "optimizer": {"fp32": 1}}


def logged() -> set[str]:
    result = make_result(make_config(Path("outputs")))
    result["phases_ms"] = dict.fromkeys(PHASES, 1.0)
    result["dtypes"] = DTYPES
    result["loss"] |= {"validation": 5.3, "perplexity": 200.0}
    sizes = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_predicted_bytes", "activations_predicted_bytes")
    result["memory"] |= dict.fromkeys(sizes, 1 << 20)
    found = {*names.summary_metrics(result), *names.step_metrics({"event": "validation", "step": 1, "loss": 5.3})}
    for kind in ("rss", "allocated"):
        found |= names.step_metrics(step_event(1, 0) | {"memory_kind": kind}).keys()
    return found


def test_the_list_is_the_golden_one() -> None:
    lines = [f"{name}  [{unit.text or 'a number'}]  {meaning}" for name, (unit, meaning) in names.METRICS.items()]
    assert lines == GOLDEN.read_text().splitlines(), f"if that was meant: change {GOLDEN.name} and docs/tracking.md too"


def test_every_metric_that_is_logged_is_in_the_list_and_the_reverse() -> None:
    by_pattern = {name: [metric for metric in names.METRICS if fnmatchcase(name, metric)] for name in logged()}
    assert [name for name, patterns in by_pattern.items() if not patterns] == []
    assert {pattern for patterns in by_pattern.values() for pattern in patterns} == set(names.METRICS)


def test_a_name_ends_with_its_unit() -> None:
    ends = {unit.end for unit, _ in names.METRICS.values() if unit.end}
    for name, (unit, _) in names.METRICS.items():
        stem = re.sub(r"_(p10|p90|per_rank)$", "", name)
        assert stem.endswith(unit.end), name
        assert unit.end or not stem.endswith(tuple(ends)), name


def test_the_page_lists_them() -> None:
    text = PAGE.read_text()
    missing = [
        name
        for name, (unit, meaning) in names.METRICS.items()
        if f"| `{name}` | {unit.text or '-'} | {meaning} |" not in text
    ]
    assert missing == []
